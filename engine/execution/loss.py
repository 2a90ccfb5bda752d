"""The loss of a step: the number of items that it is averaged over, and its sum over micro-batches and replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.sums import ReplicaSum
from weft.engine.distributed import together
from weft.engine.execution.step_state import LabelCount, StepState
from weft.engine.models.batch import count_label_tokens, label_tokens
from weft.engine.models.objective import Minimised, attach_items, attached_items


@dataclass(kw_only=True, eq=False)
class StepLoss:
    """Counts items and sums losses on a rank. Ranks of the last stage compute losses, and other ranks receive the sum.

    Token losses are divided by the number of items of the whole step. So losses of micro-batches and replicas are
    added, never averaged.

    Attributes:
        minimised: the objective, or None for the model's own loss.
        holds: whether this rank holds the last stage.
        source: global rank that holds the last stage in this rank's pipeline.
        replicas: group of the ranks that hold the same stages. None means this rank alone.
        pipeline: group of the ranks that hold a model together. None means this rank alone.
        counts: whether this rank counts an objective's items. One of the ranks that share a micro-batch does.
    """

    minimised: Minimised | None
    holds: bool
    source: int
    replicas: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    device: torch.device
    counts: bool = True

    def __post_init__(self) -> None:
        self._is_checked = False
        self._counted: LabelCount | None = None

    def attach_items_of(self, prepared: dict[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        """Attach the number of the objective's items in ``batch``, in host memory, to the prepared micro-batch."""
        if self.minimised is not None and self.holds:
            attach_items(prepared, self.minimised.items(batch))

    def items(self, batch: Mapping[str, Tensor]) -> int:
        """Return the items of a micro-batch over which the loss is averaged: tokens with labels, or the objective's."""
        return count_label_tokens(batch) if self.minimised is None else self.minimised.items(batch)

    def count(self, batches: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """Start to count the items on ranks that compute the loss, and return the fields of `StepState` for items."""
        if not self.holds:
            return {"num_items": None}
        if self.minimised is None:
            counted, empty = torch.stack([label_tokens(batch) for batch in batches]).sum(), frozenset[int]()
        else:
            items = [attached_items(batch) for batch in batches]
            counted = torch.tensor(sum(items) if self.counts else 0).to(self.device, non_blocking=True)
            empty = frozenset(m for m, count in enumerate(items) if not count)
        return {"num_items": LabelCount(counted, self.replicas), "empty": empty}

    def check(self, count: LabelCount | None) -> None:
        """Store a step's count, and raise an error if the previous step had no labels. This avoids a synchronisation.

        Raises:
            ValueError: the previous step had no labels.
        """
        earlier, self._counted = self._counted, count
        if earlier is not None:
            earlier.check()

    def check_objective(self) -> None:
        """Check after the first step that the objective divides its sum by the number of items. Collective call, once.

        Raises:
            ValueError: on every rank, if it does not.
        """
        if self.minimised is not None and not self._is_checked:
            self._is_checked = True
            together(self.minimised.require_sums)

    def local_sum(self, state: StepState) -> Tensor | None:
        """Return the sum of the losses of this rank's micro-batches, in fp32, or None on ranks that compute no loss."""
        return torch.stack([loss.float() for loss in state.losses.values()]).sum() if state.losses else None

    def sum(self, state: StepState) -> ReplicaSum | None:
        """Start to sum the loss over micro-batches and replicas. Return None on ranks that compute no loss."""
        loss = self.local_sum(state)
        return None if loss is None else ReplicaSum(loss, self.replicas)

    def share(self, loss: ReplicaSum | None) -> Tensor:
        """Wait for the step's loss on the rank of the last stage, broadcast it over the pipeline, and return it."""
        shared = torch.zeros((), device=self.device) if loss is None else loss.wait()
        if self.pipeline is not None:
            dist.broadcast(shared, src=self.source, group=self.pipeline)
        return shared
