"""The HTTP service in front of the prefill workers."""
