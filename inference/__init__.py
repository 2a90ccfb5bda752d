"""Prefill serving in the training pipeline's bubbles."""
