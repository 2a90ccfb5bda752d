"""Parallelism inside layers: ranks that share the work of one micro-batch."""
