"""Claims of papers, compared with Weft's models."""
