"""Adapters for DeepSpeed: a user's configuration, methods of the engine, the module and its grid of ranks."""
