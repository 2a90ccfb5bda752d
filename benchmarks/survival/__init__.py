"""Faults for `benchmarks survive`, how they are done to a run, and the load of many agents on a driver."""
