"""The trained weights as they were at the start of a run, in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.engine.zero import Sharding


class InitialWeights:
    """Copies of a rank's trained weights as they are now, in the number format of its computations.

    A rank copies what it stores: all weights of its stages, or at ZeRO stage 3 its shard. With adapters these are the
    adapters only, which change nothing as long as they are not trained.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._buckets = sharding.trained
        pinned = sharding.device.type == "cuda"
        self._copies = [torch.empty(b.stored.shape, dtype=b.stored.dtype, pin_memory=pinned) for b in self._buckets]
        for bucket, copy in zip(self._buckets, self._copies, strict=True):
            copy.copy_(bucket.stored)

    @property
    def num_bytes(self) -> int:
        """Host memory of the copies."""
        return sum(copy.nbytes for copy in self._copies)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model has these weights. The copies hold the trained ones meanwhile, exactly."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for bucket, copy in zip(self._buckets, self._copies, strict=True):
            bucket.exchange(copy)
