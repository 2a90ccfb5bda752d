"""Training and prefill side by side: what `weft bench bubbles` runs and reckons."""
