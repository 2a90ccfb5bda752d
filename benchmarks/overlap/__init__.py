"""Emulated strands: compute that sleeps, and real collectives that also take an emulated link's time."""
