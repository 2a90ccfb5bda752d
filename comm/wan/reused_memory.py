"""Host memory for received tensors that is taken again when its tensor is gone.

The kernel clears every page before its first use, which costs more than receiving into it. A
step receives what the step before it did, so memory that has been in use once is enough.
"""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict, deque

import torch
from torch import Tensor

from weft.comm.channel import TensorSpec

LEAST_BYTES = 128 << 10
"""Smaller tensors are left to torch, whose allocator takes memory again by itself."""
_GRAIN = 64 << 10  # sizes are rounded up to it, so that nearly equal ones share blocks


class ReusedMemory:
    """Blocks of memory, free or in use; together never more than were in use at one time."""

    def __init__(self) -> None:
        """Begin with none."""
        self._free: OrderedDict[int, mmap.mmap] = OrderedDict()  # by number; who is free for longest comes first
        self._given_back: deque[tuple[int, mmap.mmap]] = deque()  # by whichever thread drops a tensor
        self._taken = 0
        self._used_bytes = self._free_bytes = self._most_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What all blocks take."""
        self._take_back()
        return self._used_bytes + self._free_bytes

    def tensor(self, spec: TensorSpec) -> Tensor:
        """A tensor with arbitrary content; its memory is free again when nothing refers to it."""
        count = torch.Size(spec.shape).numel()
        num_bytes = count * spec.dtype.itemsize
        if num_bytes < LEAST_BYTES:
            return torch.empty(spec.shape, dtype=spec.dtype)
        block = self._block(-(-num_bytes // _GRAIN) * _GRAIN)
        self._taken += 1
        view = memoryview(block)
        weakref.finalize(view, self._given_back.append, (self._taken, block)).atexit = False
        return torch.frombuffer(view, dtype=spec.dtype, count=count).view(spec.shape)

    def close(self) -> None:
        """Let go of what is free; what is in use goes with its tensors."""
        self._take_back()
        self._free.clear()
        self._free_bytes = 0

    def _block(self, size: int) -> mmap.mmap:
        self._take_back()
        self._used_bytes += size
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        for number in reversed(self._free):  # the last used is likeliest to be in a cache
            if len(self._free[number]) == size:
                self._free_bytes -= size
                return self._free.pop(number)
        while self._free and self._used_bytes + self._free_bytes > self._most_bytes:
            self._free_bytes -= len(self._free.popitem(last=False)[1])
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _take_back(self) -> None:
        while self._given_back:
            number, block = self._given_back.popleft()
            self._free[number] = block
            self._used_bytes -= len(block)
            self._free_bytes += len(block)
