"""Training and prefill on the same ranks: the parts of `benchmarks bubbles`."""
