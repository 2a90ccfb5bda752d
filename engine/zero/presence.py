"""Presence: the parameters that have a gradient in a step on at least one of the ranks that hold them.

As in torch, the optimiser skips a weight without a gradient: no decay, no moments, no step count. The zeros in a
bucket's buffer do not show this, because a gradient may be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from weft.comm.sums import ReplicaSum
from weft.engine.zero.bucket import Bucket


class Presence:
    """The parameters of a rank's buckets that have a gradient in this step. Collective calls over their holders."""

    def __init__(
        self, buckets: Iterable[Bucket], start_sum: Callable[[Tensor], ReplicaSum], device: torch.device
    ) -> None:
        """Start to count the ranks with a gradient, parameter by parameter. This does not synchronise the host.

        Args:
            start_sum: starts to sum a tensor over the ranks that hold the same stages.
        """
        # Weights that are tied over pipeline ranks are embeddings, which always have a gradient.
        members = [(b, m.parameter) for b in buckets if b.tied is None for m in b.members]
        self._parameters = [parameter for _, parameter in members]
        here = [float(parameter in bucket.present) for bucket, parameter in members]
        self._lacks = not all(here)
        if here:
            self._counts = start_sum(torch.tensor(here).to(device, non_blocking=True))

    def absent(self) -> set[nn.Parameter]:
        """Return the parameters without a gradient on any rank. Synchronises the host if this rank lacks a gradient."""
        if not self._lacks:
            return set()
        counts = self._counts.wait().tolist()
        return {parameter for parameter, count in zip(self._parameters, counts, strict=True) if not count}
