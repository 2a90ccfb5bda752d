"""Benchmarks, each `main(argv) -> int`; `weft bench NAME` runs one."""
