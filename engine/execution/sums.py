"""Asynchronous sums of a few numbers over replicas, started early and waited for before use.

A small message queues behind weights that are being sent over a slow link. So counts and losses are sent during
computations, and the loss is sent before the weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

NO_LABELS = "data: no token of this step carries a label; check the labels or the chat template"


class ReplicaSum:
    """Numbers that are being summed. See `weft.comm.channel.Handle`."""

    def __init__(self, number: Tensor, group: dist.ProcessGroup | None) -> None:
        """Start the sum.

        Args:
            number: a scalar or a vector, which is overwritten by the sum.
            group: the replicas. None is a single one.
        """
        self._number = number
        self._work = None if group is None else dist.all_reduce(number, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the sum. On a GPU the current stream waits for it, not the host."""
        if self._work is not None:
            self._work.wait()  # at each call, because the current stream may differ
        return self._number


def sum_now(number: Tensor, *, replicas: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over all ranks, the same on every rank. Blocks.

    Replicas add their numbers first. Then each pipeline rank sends its sum to every other one directly, because an
    all-reduce over the world would cross the WAN several times in sequence.

    Args:
        number: a scalar or a vector, which is overwritten.
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
        """The count, fp32, after `wait`."""
        self._told: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def is_known(self) -> bool:
        """True after `wait`."""
        return self._sum is None

    def wait(self) -> Tensor:
        """Fill and return `items`. On a GPU only the current stream waits.

        Raises:
            ValueError: the count is zero. On a GPU, `check` raises this.
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
        """Copy the count to the host for `check`. A step without labels has a loss and gradients of zero."""
        told = torch.empty((), pin_memory=True)
        told.copy_(self.items, non_blocking=True)
        self._told = told, torch.cuda.current_stream(self.items.device).record_event()
        self.items.clamp_(min=1.0)

    def check(self) -> None:
        """Raise an error for a count of zero. To be called in a later step than `wait`, so that the host hardly waits.

        Raises:
            ValueError: the step had no labels.
        """
        if self._told is not None:
            told, event = self._told
            event.synchronize()
            if told == 0:
                raise ValueError(NO_LABELS)
