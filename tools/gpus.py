"""The GPUs that this process may use, found without torch."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path


def num_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [device.strip() for device in visible.split(",")]
        return list(takewhile(lambda device: device not in ("", "-1"), named))  # CUDA ignores what follows those, too
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
