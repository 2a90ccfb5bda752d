"""Bytes of state of an optimiser that the caller passes, measured by one step on a small matrix."""

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
        given: an optimiser, of whose class another one is created, or a function of parameter groups.
        device: device of the step.
        width: width of the model's matrices, because some optimisers store state per row and column.
        flat: whether the optimiser updates shards, which have one dimension, instead of matrices.

    Raises:
        Exception: any error of the optimiser.
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
