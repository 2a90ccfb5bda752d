"""Hidden states in host memory as arrays of bytes, which are pickled with one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with each tensor as its type, its shape and its bytes."""
    return {
        name: (value.dtype, tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
    }


def unpacked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `packed` was given."""
    return {name: _tensor(*value) if _is_packed(value) else value for name, value in values.items()}


def _is_packed(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], np.ndarray)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)
