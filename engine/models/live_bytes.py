"""Bytes of the tensors that operations make, as they are made and freed."""

from __future__ import annotations

from typing import Any
from weakref import finalize

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that operations have made and that still exist, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                finalize(storage, self._free, storage._cdata, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.now)
        return made

    def _free(self, address: int, num_bytes: int) -> None:
        self.alive.discard(address)
        self.now -= num_bytes
