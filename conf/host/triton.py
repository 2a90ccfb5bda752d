"""Triton on this host."""

from __future__ import annotations

import os
from importlib.util import find_spec

PACKAGES = {"triton": "triton", "liger_kernel": "liger-kernel"}
"""Packages that fused kernels need, by module."""


def is_interpreted() -> bool:
    """True if Triton interprets kernels instead of compiling them, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernel_obstacle(on_gpu: bool) -> str:
    """Return why fused kernels do not run on this host, with the remedy, or an empty string if they do.

    Args:
        on_gpu: whether they would run on a GPU.
    """
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} not installed; pip install {' '.join(missing)}, or set it to none"
    if not on_gpu and not is_interpreted():
        return "Triton has no CPU backend; train on GPUs, or set it to none (or, for tests, TRITON_INTERPRET=1)"
    return ""
