"""The number of tokens with labels in a step, summed over replicas while the step computes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.sums import ReplicaSum

NO_LABELS = "data: no token of this step carries a label; check the labels or the chat template"


class LabelCount:
    """The number of tokens that count in the loss, over all micro-batches and replicas of a step."""

    def __init__(self, count: Tensor, group: dist.ProcessGroup | None) -> None:
        """Start to sum the ``count`` of this replica, a scalar on its device."""
        exact = torch.float64 if count.device.type == "cpu" else torch.float32
        self._sum: ReplicaSum | None = ReplicaSum(count.to(exact), group)
        self.items = torch.zeros((), device=count.device)
        """The count, fp32, after `wait`."""
        self._host_count: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def is_known(self) -> bool:
        """True after `wait`."""
        return self._sum is None

    def wait(self) -> Tensor:
        """Wait for the sum, copy it to `items`, and return `items`. On a GPU only the current stream waits.

        Raises:
            ValueError: the count is zero. On a GPU, `check` raises this error instead.
        """
        if self._sum is not None:
            self.items.copy_(self._sum.wait())
            self._sum = None
            if self.items.is_cuda:
                self._copy_to_host()
            elif self.items == 0:
                raise ValueError(NO_LABELS)
        return self.items

    def _copy_to_host(self) -> None:
        """Copy the count to the host for `check`. A step without labels has a loss and gradients of zero."""
        count = torch.empty((), pin_memory=True)
        count.copy_(self.items, non_blocking=True)
        self._host_count = count, torch.cuda.current_stream(self.items.device).record_event()
        self.items.clamp_(min=1.0)

    def check(self) -> None:
        """Raise an error if the count is zero. Called one step after `wait`, this hardly blocks the host.

        Raises:
            ValueError: the step had no labels.
        """
        if self._host_count is not None:
            count, event = self._host_count
            event.synchronize()
            if count == 0:
                raise ValueError(NO_LABELS)
