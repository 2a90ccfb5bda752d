"""Jobs that `benchmarks emulation` runs for real and emulated."""
