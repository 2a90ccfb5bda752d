"""Virtual stages, cut out of Hugging Face models."""
