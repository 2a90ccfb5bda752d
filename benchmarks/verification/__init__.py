"""Comparisons with what is known to be right: Hugging Face's forward, proven optima."""
