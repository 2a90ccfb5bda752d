"""Comparisons with references: Hugging Face's forward, proven optima."""
