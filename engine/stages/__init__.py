"""Hugging Face models as virtual pipeline stages."""
