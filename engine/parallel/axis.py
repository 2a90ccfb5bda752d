"""An axis group: the ranks that share the work of one micro-batch along one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.channel import Handle
from weft.conf.schema import ContextExchange

AXES = ("tensor", "context", "expert")
"""The axes along which the work of a layer is shared."""


class AxisGroup(Protocol):
    """Ranks with the same position along every axis but one.

    All members start the same operations in the same order. An operation takes a contiguous tensor, starts at
    once, and ends with its handle's `wait`, which on a GPU blocks only the current stream. Input and output must
    not be used before.
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
        """Return this rank's index in the group."""
        ...

    def all_gather(self, shard: Tensor) -> Handle:
        """Concatenate all members' [n, ...] to [size n, ...]."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """Return this member's part [n, ...] of the sum over members of [size n, ...]."""
        ...

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum over members, in place."""
        ...

    def maximum(self, tensor: Tensor) -> Handle:
        """Take the elementwise maximum over members, in place."""
        ...

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """Send rows of ``tensor`` [sum(send), ...] to the members in order, and receive theirs: [sum(receive), ...]."""
        ...

    def shift(self, tensor: Tensor) -> Handle:
        """Send the tensor to the next member, and receive the previous one's, of the same shape.

        The sent tensor may be read meanwhile.
        """
        ...


@dataclass(frozen=True)
class Completed:
    """The handle of an operation without communication."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Return the tensor."""
        return self.tensor


@dataclass(frozen=True)
class Alone:
    """The axis group of a single rank."""

    axis: str
    size: int = 1
    index: int = 0

    def all_gather(self, shard: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(shard)

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(tensor)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(tensor)

    def maximum(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(tensor)

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """See `AxisGroup`."""
        assert list(send) == list(receive) == [tensor.shape[0]]
        return Completed(tensor)

    def shift(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return Completed(tensor)


@dataclass(frozen=True)
class AxisGroups:
    """A rank's groups along the axes that divide the work of one replica.

    Attributes:
        tensor: members hold parts of each layer's matrices, and of the sequence between blocks.
        context: members hold parts of the sequence.
        expert: members hold different experts, and the same other parameters.
        exchange: implementation of attention over members of ``context``, not auto.
    """

    tensor: AxisGroup = field(default_factory=lambda: Alone("tensor"))
    context: AxisGroup = field(default_factory=lambda: Alone("context"))
    expert: AxisGroup = field(default_factory=lambda: Alone("expert"))
    exchange: ContextExchange = ContextExchange.gather

    @property
    def by_axis(self) -> dict[str, AxisGroup]:
        """The groups by axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def with_groups(self, groups: Mapping[str, AxisGroup]) -> AxisGroups:
        """Return a copy with other groups along some axes."""
        fields: dict[str, Any] = dict(groups)
        return replace(self, **fields)


def gather(group: AxisGroup, shard: Tensor, dim: int) -> Tensor:
    """Concatenate all members' shards along ``dim``, without gradient."""
    if group.size == 1:
        return shard
    rows = group.all_gather(shard.contiguous()).wait()
    return rows if dim == 0 else torch.cat(rows.chunk(group.size), dim)


def scatter_sum(group: AxisGroup, tensor: Tensor, dim: int) -> Tensor:
    """Return this member's part along ``dim`` of the sum over members, without gradient."""
    if group.size == 1:
        return tensor
    return group.reduce_scatter(torch.cat(tensor.chunk(group.size, dim)) if dim else tensor.contiguous()).wait()
