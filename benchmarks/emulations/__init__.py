"""Jobs that `benchmarks emulation` runs for real and emulated, and single collectives of both kinds."""
