"""fp8 products on this host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec

LOWEST_CAPABILITY = (8, 9)
"""Compute capability from which NVIDIA's GPUs multiply fp8: Ada and Hopper."""
ON_CPU = "WEFT_FLOAT8_ON_CPU"
"""Environment variable with which tests multiply fp8 on CPUs."""


def float8_obstacle(on_gpu: bool, capability: tuple[int, int] | None = None) -> str:
    """Return why fp8 products do not run on this host, with the remedy, or an empty string if they do.

    Args:
        on_gpu: whether they would run on a GPU.
        capability: the lowest compute capability of the GPUs, or None if it is not known.
    """
    if find_spec("torchao") is None:
        return "torchao is not installed; run pip install torchao, or set it to none"
    if not on_gpu and os.environ.get(ON_CPU) != "1":
        return f"it is for GPUs with fp8 products; train on those, or set it to none (or, for tests, {ON_CPU}=1)"
    if on_gpu and capability is not None and capability < LOWEST_CAPABILITY:
        has, needed = (".".join(map(str, each)) for each in (capability, LOWEST_CAPABILITY))
        return f"a GPU with compute capability {has} has no fp8 products, which need {needed}; set it to none"
    return ""


def lowest_capability(devices: Sequence[str]) -> tuple[int, int] | None:
    """Return the lowest compute capability of these GPUs, or None if nvidia-smi is not available."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", f"--id={','.join(devices)}"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return min((int(major), int(minor)) for major, _, minor in (line.partition(".") for line in lines))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
