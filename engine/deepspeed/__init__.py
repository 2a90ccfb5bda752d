"""Handling of DeepSpeed's configuration keys: taken over, read by DeepSpeed, refused, or without effect."""
