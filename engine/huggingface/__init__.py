"""transformers' Trainer, run on Weft's engine."""
