"""An axis group: the ranks that share the work of one micro-batch along one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.channel import Completed, Handle
from weft.conf.schema import ContextExchange


class UnshareableError(ValueError):
    """Error for a model or an input that a group cannot divide. The message has the field, its value and the remedy."""


AXES = ("tensor", "context", "expert")
"""Axes along which ranks share the work of a layer."""


class AxisGroup(Protocol):
    """Ranks with the same position along every axis except one.

    All members start the same operations in the same order. An operation takes a contiguous tensor and starts at once.
    Its handle's `wait` ends it; on a GPU this blocks only the current stream. Input and output must not be used before.
    """

    @property
    def axis(self) -> str:
        """Name of the axis: tensor, context or expert."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    @property
    def index(self) -> int:
        """Index of this rank in the group."""
        ...

    def all_gather(self, shard: Tensor) -> Handle:
        """Concatenate all members' tensors [n, ...] to [size n, ...]."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """Sum tensors [size n, ...] over the members, and return this member's part [n, ...] of the sum."""
        ...

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum the tensor over the members, in place."""
        ...

    def maximum(self, tensor: Tensor) -> Handle:
        """Compute the elementwise maximum over the members, in place."""
        ...

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """Send slices of ``tensor`` [sum(send), ...] to the members in order, and receive theirs as [sum(receive),
        ...].
        """
        ...

    def shift(self, tensor: Tensor) -> Handle:
        """Send the tensor to the next member, and receive the previous member's tensor of the same shape.

        The sent tensor may be read, but not written, until the operation ends.
        """
        ...


@dataclass(frozen=True)
class Alone:
    """The axis group of a single rank."""

    axis: str
    size: int = 1
    index: int = 0

    def all_gather(self, shard: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(shard)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(tensor)

    reduce_scatter = maximum = shift = all_reduce

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """See `AxisGroup`."""
        assert list(send) == list(receive) == [tensor.shape[0]]
        return Completed(tensor)


@dataclass(frozen=True)
class AxisGroups:
    """A rank's groups along the axes that divide the work of one replica.

    Attributes:
        tensor: its members have different parts of each layer's matrices, and of the sequence between blocks.
        context: its members have different parts of the sequence.
        expert: its members have different experts, and the same other parameters.
        exchange: implementation of attention over members of ``context``. It is never auto.
    """

    tensor: AxisGroup = field(default_factory=lambda: Alone("tensor"))
    context: AxisGroup = field(default_factory=lambda: Alone("context"))
    expert: AxisGroup = field(default_factory=lambda: Alone("expert"))
    exchange: ContextExchange = ContextExchange.gather

    @property
    def by_axis(self) -> dict[str, AxisGroup]:
        """The groups, by the name of their axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def with_groups(self, groups: Mapping[str, AxisGroup]) -> AxisGroups:
        """Return a copy in which ``groups`` replaces the groups of the same axes."""
        fields: dict[str, Any] = dict(groups)
        return replace(self, **fields)


def gather(group: AxisGroup, shard: Tensor, dim: int) -> Tensor:
    """Concatenate all members' shards along ``dim``, without recording gradients."""
    if group.size == 1:
        return shard
    rows = group.all_gather(shard.contiguous()).wait()
    return rows if dim == 0 else torch.cat(rows.chunk(group.size), dim)


def scatter_sum(group: AxisGroup, tensor: Tensor, dim: int) -> Tensor:
    """Sum the tensor over members, and return this member's part along ``dim``, without recording gradients."""
    if group.size == 1:
        return tensor
    return group.reduce_scatter(torch.cat(tensor.chunk(group.size, dim)) if dim else tensor.contiguous()).wait()
