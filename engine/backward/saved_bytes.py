"""Measure the activation memory that a forward saves for its backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Context that counts the memory of the tensors that autograd saves. Shared storage counts once.

    Of a checkpointed region only the inputs count, not what is recomputed. Parameters and buffers
    are not counted.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        """Exclude the ``resident`` tensors, which are alive anyway."""
        self._resident = {tensor.untyped_storage()._cdata for tensor in resident}
        self._sizes: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Identify by storage object, not by address: sharded weights are freed and allocated again.
        if storage._cdata not in self._resident:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Bytes counted so far."""
        return sum(self._sizes.values())
