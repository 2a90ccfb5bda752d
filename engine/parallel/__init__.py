"""Parallelism inside of a layer: ranks that share the work of one micro-batch."""
