"""Bytes of state of an optimiser that the caller passes, from a step of it on a few weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

WIDEST = 1024
"""Most rows and columns of the matrix that is stepped."""

OptimizerMaker = Callable[[Iterable[dict[str, Any]]], Optimizer]
"""Makes an optimiser of parameter groups."""


def state_bytes(given: Optimizer | OptimizerMaker, device: torch.device, width: int, *, flat: bool) -> float:
    """Return the bytes of state that an optimiser keeps for each fp32 weight that it steps.

    Args:
        given: an optimiser, another one of which is made, or a function of parameter groups.
        device: where it steps.
        width: of the model's matrices, for optimisers whose state is that of rows and columns.
        flat: whether it steps shards, which have one dimension, instead of matrices.

    Raises:
        Exception: any that the optimiser raises.
    """
    width = min(width, WIDEST)
    shape = (width * width,) if flat else (width, width)
    weight = nn.Parameter(torch.ones(shape, device=device))
    weight.grad = torch.ones_like(weight)
    groups = [{"params": [weight]}]
    optimizer = type(given)(groups, **given.defaults) if isinstance(given, Optimizer) else given(groups)
    optimizer.step()
    return sum(map(_bytes_of, optimizer.state[weight].values())) / weight.numel()


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) and value.numel() > 1 else 0
