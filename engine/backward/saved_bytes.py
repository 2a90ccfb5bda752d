"""The meter of what a forward saves for its backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """While active, counts the memory of the tensors that autograd saves, shared memory once.

    What a checkpointed region will recompute is not counted, its inputs are. Parameters and
    buffers live anyway and are left out.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        """Take the tensors that live anyway."""
        self._resident = {tensor.untyped_storage()._cdata for tensor in resident}
        self._sizes: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # By storage and not by address: sharded weights come and go under the same storage.
        if storage._cdata not in self._resident:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Bytes counted so far."""
        return sum(self._sizes.values())
