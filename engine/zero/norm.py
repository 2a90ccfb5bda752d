"""Sums of squares that are accurate for tensors of any length."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ROW = 4096
"""Number of squares that are summed in fp32 on a CPU."""


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements of ``tensors``, a float64 scalar on ``device``.

    On a CPU torch sums sequentially in fp32. The result for 50 million elements was 4e-3 too small. So each tensor
    is divided into short parts, which are summed in fp32, and the sums of parts are added in float64. On a GPU torch
    sums in a tree, which is accurate. No tensor is copied.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    norms = [row for t in filled if t.device.type == "cpu" for row in _row_norms(t.reshape(-1))]
    if elsewhere := [tensor for tensor in filled if tensor.device.type != "cpu"]:
        norms.append(torch.stack([norm.float() for norm in torch._foreach_norm(elsewhere)]))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).double().square().sum()


def _row_norms(flat: Tensor) -> Iterable[Tensor]:
    rows = flat.numel() // ROW * ROW
    dtype = None if flat.itemsize >= 4 else torch.float32
    if rows:
        yield torch.linalg.vector_norm(flat[:rows].view(-1, ROW), dim=1, dtype=dtype)
    if rows < flat.numel():
        yield torch.linalg.vector_norm(flat[rows:], dtype=dtype).view(1)
