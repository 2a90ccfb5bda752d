"""Presence: which parameters have a gradient in a step, on any of the ranks that hold them.

As in torch, a weight without a gradient is left alone: no decay, no moments, no step is counted. A bucket's buffer
has zeros there, from which it cannot be distinguished, because a gradient may be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from weft.engine.execution.sums import ReplicaSum
from weft.engine.zero.bucket import Bucket


class Presence:
    """The parameters of a rank's buckets that have a gradient in this step. Collective call over their holders."""

    def __init__(
        self, buckets: Iterable[Bucket], start_sum: Callable[[Tensor], ReplicaSum], device: torch.device
    ) -> None:
        """Start to count, before the gradients have been reduced; the host waits for nothing.

        Args:
            start_sum: starts to sum a tensor over the ranks that hold the same stages.
        """
        # Weights that pipeline ranks tie are embeddings, which every token uses.
        members = [(b, m.parameter) for b in buckets if b.tied is None for m in b.members]
        self._parameters = [parameter for _, parameter in members]
        here = [float(parameter in bucket.present) for bucket, parameter in members]
        self._lacks = not all(here)
        if here:
            self._counts = start_sum(torch.tensor(here).to(device, non_blocking=True))

    def absent(self) -> set[nn.Parameter]:
        """Parameters that no rank has a gradient of; the host waits if this rank lacks one."""
        if not self._lacks:
            return set()
        counts = self._counts.wait().tolist()
        return {parameter for parameter, count in zip(self._parameters, counts, strict=True) if not count}
