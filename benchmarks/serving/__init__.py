"""Training and prefill side by side: what `benchmarks bubbles` runs and reckons."""
