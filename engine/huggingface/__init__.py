"""Transformers' Trainer over Weft's engine."""
