"""Autograd functions that move activations between the members of an axis group.

One rule holds for gradients: between a `gather` and the next `scatter_sum`, and after `take_slice`, each member's
gradients are its part of a sum. The same applies to all weights that members hold in full. Their gradient is the sum
over the axis, computed once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engine.parallel import axis
from weft.engine.parallel.axis import AxisGroup


def gather(group: AxisGroup, shard: Tensor, dim: int) -> Tensor:
    """Concatenate all members' shards along ``dim``. The backward sums the gradient over members and scatters it."""
    return shard if group.size == 1 else _Gather.apply(shard, group, dim)


def scatter_sum(group: AxisGroup, tensor: Tensor, dim: int) -> Tensor:
    """Sum over members, and return this member's part along ``dim``. The backward gathers the gradient."""
    return tensor if group.size == 1 else _ScatterSum.apply(tensor, group, dim)


def all_sum(group: AxisGroup, tensor: Tensor) -> Tensor:
    """Sum over members. Each member has a part of the gradient, so the backward sums it over members as well."""
    return tensor if group.size == 1 else _AllSum.apply(tensor, group)


def take_slice(group: AxisGroup, tensor: Tensor, dim: int) -> Tensor:
    """Return this member's slice along ``dim`` of a tensor that all members have. The gradient is zero elsewhere."""
    return tensor if group.size == 1 else tensor.chunk(group.size, dim)[group.index]


def collect(group: AxisGroup, shard: Tensor, dim: int) -> Tensor:
    """Concatenate all members' shards along ``dim`` for a computation that all members repeat.

    The backward takes this member's part of the gradient, which is the same on all members.
    """
    return shard if group.size == 1 else _Collect.apply(shard, group, dim)


def count_once(group: AxisGroup, tensor: Tensor) -> Tensor:
    """Return a tensor that all members have and use in a computation that all repeat.

    The backward divides the gradient by the number of members.
    """
    return tensor if group.size == 1 else _CountOnce.apply(tensor, group)


def exchange(group: AxisGroup, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Exchange slices of ``rows`` with all members, as `AxisGroup.all_to_all` does.

    The backward sends gradients back.
    """
    return rows if group.size == 1 else _Exchange.apply(rows, group, send, receive)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return axis.gather(group, shard, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return axis.scatter_sum(ctx.group, gradients[0], ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return axis.scatter_sum(group, tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return axis.gather(ctx.group, gradients[0], ctx.dim), None, None


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.all_reduce(tensor.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradients[0].clone(memory_format=torch.contiguous_format)).wait(), None


class _Collect(_Gather):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].chunk(ctx.group.size, ctx.dim)[ctx.group.index], None, None


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: AxisGroup) -> Tensor:
        ctx.size = group.size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.size, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: AxisGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return group.all_to_all(rows.contiguous(), send, receive).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.all_to_all(gradients[0].contiguous(), ctx.receive, ctx.send).wait(), None, None, None
