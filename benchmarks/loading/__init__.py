"""A rank that only reads its batches, for `benchmarks data`."""
