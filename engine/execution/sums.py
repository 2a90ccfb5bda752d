"""Sums of a few numbers over replicas, started as soon as it is known and waited for where it is used.

A small message that starts while weights are on their way over a slow link waits in the same
queues. So the step's counts and losses travel while something else is computed, and the loss
sets out before the weights do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

NO_LABELS = "data: no token of this step carries a label; check the labels or the chat template"


class ReplicaSum:
    """Numbers that are being summed. See `weft.comm.channel.Handle`."""

    def __init__(self, number: Tensor, group: dist.ProcessGroup | None) -> None:
        """Start.

        Args:
            number: a scalar or a vector; the sum takes its place.
            group: the replicas. None is a single one.
        """
        self._number = number
        self._work = None if group is None else dist.all_reduce(number, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The sum; on a GPU the stream that is current waits for it, and not the host."""
        if self._work is not None:
            self._work.wait()  # each time, because the next may ask from another stream
        return self._number


def sum_now(number: Tensor, *, replicas: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None) -> Tensor:
    """The sum over all ranks, for those who cannot go on without it; the same on every rank.

    Replicas add theirs up first. Then each pipeline rank tells every other one directly: an
    all-reduce over the world would cross the WAN several times, one time after the other.

    Args:
        number: a scalar or a vector; it is overwritten.
        replicas: ranks that hold the same stages. None is this rank alone.
        pipeline: ranks that hold a model together. None is this rank alone.
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


class LabelCount:
    """Tokens that count in the loss, over all micro-batches and replicas of a step."""

    def __init__(self, count: Tensor, group: dist.ProcessGroup | None) -> None:
        """Start to sum the ``count`` of this replica, a scalar on its device."""
        exact = torch.float64 if count.device.type == "cpu" else torch.float32
        self._sum: ReplicaSum | None = ReplicaSum(count.to(exact), group)
        self.items = torch.zeros((), device=count.device)
        """The count, fp32, once it was waited for."""
        self._told: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def is_known(self) -> bool:
        """True if it was waited for."""
        return self._sum is None

    def wait(self) -> Tensor:
        """`items`, filled; on a GPU only the current stream waits.

        Raises:
            ValueError: there is none; of a GPU's count `check` says so.
        """
        if self._sum is not None:
            self.items.copy_(self._sum.wait())
            self._sum = None
            if self.items.is_cuda:
                self._tell()
            elif self.items == 0:
                raise ValueError(NO_LABELS)
        return self.items

    def _tell(self) -> None:
        """Send the count to the host, which asks later; a step without labels has a loss and gradients of zero."""
        told = torch.empty((), pin_memory=True)
        told.copy_(self.items, non_blocking=True)
        self._told = told, torch.cuda.current_stream(self.items.device).record_event()
        self.items.clamp_(min=1.0)

    def check(self) -> None:
        """Refuse a count of zero, in a later step than the one that waited for it, so that the host waits little.

        Raises:
            ValueError: there was no label.
        """
        if self._told is not None:
            told, event = self._told
            event.synchronize()
            if told == 0:
                raise ValueError(NO_LABELS)
