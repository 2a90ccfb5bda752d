"""Sums of one number over replicas, started as soon as it is known and waited for where it is used.

A small message that starts while weights are on their way over a slow link waits in the same
queues. So the step's counts and losses travel while something else is computed, and the loss
sets out before the weights do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class ReplicaSum:
    """A number that is being summed; see `weft.comm.channel.Handle`."""

    def __init__(self, number: Tensor, group: dist.ProcessGroup | None) -> None:
        """Start.

        Args:
            number: a scalar; the sum takes its place.
            group: the replicas; None is a single one.
        """
        self._number = number
        self._work = None if group is None else dist.all_reduce(number, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._number


def sum_now(number: Tensor, *, replicas: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None) -> Tensor:
    """The sum of a scalar over all ranks, for those who cannot go on without it; the same on every rank.

    Replicas add theirs up first. Then each pipeline rank tells every other one directly: an
    all-reduce over the world would cross the WAN several times, one time after the other.

    Args:
        number: a scalar; it is overwritten.
        replicas: ranks that hold the same stages; None is this rank alone.
        pipeline: ranks that hold a model together; None is this rank alone.
    """
    if replicas is not None:
        dist.all_reduce(number, group=replicas)
    if pipeline is None:
        return number
    mine = number.repeat(dist.get_world_size(pipeline))
    everyones = torch.empty_like(mine)
    dist.all_to_all_single(everyones, mine, group=pipeline)
    return everyones.sum()


class LabelCount:
    """Tokens that count in the loss, over all micro-batches and replicas of a step."""

    def __init__(self, count: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Start to sum the ``count`` of this replica."""
        exact = torch.float64 if device.type == "cpu" else torch.float32
        self._sum: ReplicaSum | None = ReplicaSum(torch.tensor(count, dtype=torch.float64).to(device, exact), group)
        self.items = torch.zeros((), device=device)
        """The count, fp32, once it was waited for."""

    @property
    def is_known(self) -> bool:
        """Whether it was waited for."""
        return self._sum is None

    def wait(self) -> Tensor:
        """`items`, filled.

        Raises:
            ValueError: there is none.
        """
        if self._sum is not None:
            self.items.copy_(self._sum.wait())
            self._sum = None
            if self.items == 0:
                raise ValueError("data: no token of this step carries a label; check the labels or the chat template")
        return self.items
