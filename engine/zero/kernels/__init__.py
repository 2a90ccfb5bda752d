"""Triton kernels of ZeRO, each next to the torch operations that it replaces."""
