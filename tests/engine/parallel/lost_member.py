"""Ranks that share layers, one of which goes away."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.comm.channel import ChannelError
from weft.engine.distributed import init_distributed
from weft.engine.parallel.communicated import open_axes


def exchanged(axis: str) -> tuple[list[float], ...]:
    """Return the result of each operation of an axis group on this rank."""
    device = init_distributed(30.0)
    group = getattr(open_axes({axis: [(0, 1)]}, device, 30.0), axis)
    mine = torch.arange(4.0).view(2, 2) + 10 * group.index
    send = [1, 1] if group.index == 0 else [2, 0]
    receive = [1, 2] if group.index == 0 else [1, 0]
    results = (
        group.all_gather(mine).wait(),
        group.reduce_scatter(mine).wait(),
        group.all_reduce(mine.clone()).wait(),
        group.maximum(mine.clone()).wait(),
        group.all_to_all(mine, send, receive).wait(),
        group.shift(mine).wait(),
    )
    assert (group.size, group.axis) == (2, axis)
    return tuple(result.flatten().tolist() for result in results)


def shifted(size: int) -> list[float]:
    """Return the tensors of as many shifts as there are members, on this rank."""
    device = init_distributed(30.0)
    group = open_axes({"context": [tuple(range(size))]}, device, 30.0).context
    held, seen = torch.tensor([float(group.index)]), []
    for _ in range(size):
        seen.append(held.item())
        held = group.shift(held).wait()
    assert held.item() == group.index, "it has come home"
    return seen


def lose(axis: str, size: int = 2, operation: str = "all_gather") -> str:
    """Return the error on the ranks that stay; the one before the last leaves."""
    device = init_distributed(30.0)
    group = getattr(open_axes({axis: [tuple(range(size))]}, device, 30.0), axis)
    group.all_gather(torch.ones(1)).wait()
    if group.index == max(1, size - 2):
        dist.destroy_process_group()
        return ""
    try:
        getattr(group, operation)(torch.ones(1)).wait()
    except ChannelError as error:
        return str(error)
    return "nothing"
