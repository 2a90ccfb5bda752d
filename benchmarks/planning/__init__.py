"""Parts of `benchmarks auto`."""
