"""Runs of `benchmarks startup`: Weft, and torchrun with transformers' Trainer and peft."""
