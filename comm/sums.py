"""Sums of a few numbers over ranks, at once or started early and waited for before use.

A small message queues behind weights that are being sent over a slow link. So counts and losses are sent during
computations, and the loss is sent before the weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class ReplicaSum:
    """Numbers that are being summed. See `weft.comm.channel.Handle`."""

    def __init__(self, number: Tensor, group: dist.ProcessGroup | None) -> None:
        """Start the sum of ``number`` over the replicas.

        Args:
            number: a scalar or a vector, which is overwritten by the sum.
            group: the process group of the replicas, or None for a single replica.
        """
        self._number = number
        self._work = None if group is None else dist.all_reduce(number, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the sum. On a GPU the current stream waits for it, not the host."""
        if self._work is not None:
            self._work.wait()  # at each call, because the current stream may differ
        return self._number


def sum_now(number: Tensor, *, replicas: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over all ranks, the same on every rank. Blocks until it is complete.

    Replicas add their numbers first. Then each pipeline rank sends its sum to every other one directly, because an
    all-reduce over the world would cross the WAN several times in sequence.

    Args:
        number: a scalar or a vector, which is overwritten.
        replicas: ranks that hold the same stages, or None for this rank alone.
        pipeline: ranks that hold a model together, or None for this rank alone.
    """
    if replicas is not None:
        dist.all_reduce(number, group=replicas)
    if pipeline is None:
        return number
    ranks = dist.get_world_size(pipeline)
    mine = number.reshape(-1).repeat(ranks)
    everyones = torch.empty_like(mine)
    dist.all_to_all_single(everyones, mine, group=pipeline)
    return everyones.view(ranks, -1).sum(0).view(number.shape)
