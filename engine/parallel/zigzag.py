"""Zigzag: the division of a sequence over a context group.

A sequence is cut into twice as many chunks as there are members. Each member has one chunk of the first half and its
mirror image in the second half. Under a causal mask all members then attend to equally many positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.parallel.axis import AxisGroup, UnshareableError


def chunks_of(size: int, index: int) -> tuple[int, int]:
    """Return the indices of a member's two chunks among the ``2 * size`` chunks of a sequence."""
    return index, 2 * size - 1 - index


def take(group: AxisGroup, tensor: Tensor, dim: int) -> Tensor:
    """Return this member's part along ``dim`` of a whole sequence.

    Raises:
        UnshareableError: the group cannot divide the length into equal chunks.
    """
    if group.size == 1:
        return tensor
    require_divisible(tensor.shape[dim], group.size)
    chunks = tensor.chunk(2 * group.size, dim)
    return torch.cat([chunks[number] for number in chunks_of(group.size, group.index)], dim)


def in_order(size: int, gathered: Tensor, dim: int) -> Tensor:
    """Reorder the members' parts, concatenated along ``dim``, into the whole sequence."""
    if size == 1:
        return gathered
    numbers = [number for index in range(size) for number in chunks_of(size, index)]
    chunks = dict(zip(numbers, gathered.chunk(2 * size, dim), strict=True))
    return torch.cat([chunks[number] for number in range(2 * size)], dim)


def by_member(size: int, whole: Tensor, dim: int) -> Tensor:
    """Reorder a whole sequence along ``dim`` into the members' parts, concatenated.

    This is the inverse of `in_order`.
    """
    chunks = whole.chunk(2 * size, dim)
    return torch.cat([chunks[number] for index in range(size) for number in chunks_of(size, index)], dim)


def positions(group: AxisGroup, length: int, device: torch.device | str) -> Tensor:
    """Return this member's positions in a sequence of ``length``, in the order of its part."""
    return take(group, torch.arange(length, device=device), 0)


def require_divisible(length: int, size: int) -> None:
    """Check that members can share a sequence. Raise UnshareableError if ``2 * size`` does not divide the length."""
    if length % (2 * size):
        raise UnshareableError(
            f"parallel.context={size}: a sequence of {length} tokens cannot be cut into 2 x {size} chunks of the same "
            f"length; set data.sequence_length to a multiple of {2 * size}, or lower parallel.context"
        )
