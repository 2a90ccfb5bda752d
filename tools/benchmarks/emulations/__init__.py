"""Jobs that `weft bench emulation` runs for real and emulated, and single collectives of both kinds."""
