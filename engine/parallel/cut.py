"""A cut: the part of a named tensor that a rank has."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cut:
    """Part ``index`` of ``count`` of a tensor, along one dimension.

    Attributes:
        shape: shape of the complete tensor.
        dim: the divided dimension.
        index, count: number of this part, and of all parts.
        blocks: number of equal blocks along the dimension. Each is divided. It is 2 if gate and up projections
            are concatenated in one matrix.
        axis: axis of the group whose members have the parts: tensor or expert.
    """

    shape: tuple[int, ...]
    dim: int
    index: int
    count: int
    blocks: int = 1
    axis: str = "tensor"

    def __post_init__(self) -> None:
        if self.shape[self.dim] % (self.count * self.blocks):
            raise ValueError(
                f"dimension {self.dim} of a tensor {list(self.shape)} "
                f"cannot be divided into {self.blocks} x {self.count}"
            )

    @property
    def length(self) -> int:
        """Length of the part along the dimension, within each block."""
        return self.shape[self.dim] // (self.count * self.blocks)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of the part along the dimension, within each block."""
        block = self.shape[self.dim] // self.blocks
        first = [number * block + self.index * self.length for number in range(self.blocks)]
        return tuple((start, start + self.length) for start in first)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.shape[: self.dim], self.blocks * self.length, *self.shape[self.dim + 1 :])

    @property
    def num_elements(self) -> int:
        """Number of elements of the part."""
        return prod(self.held_shape)

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy of this part of a complete tensor."""
        assert tuple(tensor.shape) == self.shape
        return torch.cat([tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def put(self, part: Tensor, into: Tensor) -> None:
        """Write this part into a complete tensor."""
        at = 0
        for start, stop in self.ranges:
            into.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
            at += stop - start


_HELD = "_weft_cut"


def held_cut(parameter: nn.Parameter) -> Cut | None:
    """Return the part of a tensor that a parameter contains, or None if none was recorded."""
    return getattr(parameter, _HELD, None)


def set_held(parameter: nn.Parameter, cut: Cut) -> None:
    """Record on a parameter that it contains this part of a tensor."""
    assert tuple(parameter.shape) == cut.held_shape
    setattr(parameter, _HELD, cut)
