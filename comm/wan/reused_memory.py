"""A caching allocator of host memory for received tensors.

The kernel zeroes every page on first use, which costs more than receiving into it. Each step
receives the same sizes, so blocks are reused once their tensors are garbage collected.
"""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict, deque

import torch
from torch import Tensor

from weft.comm.channel import TensorSpec

LEAST_BYTES = 128 << 10
"""Smaller tensors are left to torch, whose allocator reuses memory of this size."""
_GRAIN = 64 << 10  # sizes are rounded up to a multiple, so that similar ones share blocks


class ReusedMemory:
    """Memory blocks, free or in use. Their total size never exceeds the peak in use."""

    def __init__(self) -> None:
        """Start empty."""
        self._free: OrderedDict[int, mmap.mmap] = OrderedDict()  # by block number; least recently freed first
        self._returned: deque[tuple[int, mmap.mmap]] = deque()  # appended by the thread that drops a tensor
        self._taken = 0
        self._used_bytes = self._free_bytes = self._most_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Total size of all blocks."""
        self._collect_returned()
        return self._used_bytes + self._free_bytes

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return an uninitialised tensor. Its memory is reused when it is garbage collected."""
        count = torch.Size(spec.shape).numel()
        num_bytes = count * spec.dtype.itemsize
        if num_bytes < LEAST_BYTES:
            return torch.empty(spec.shape, dtype=spec.dtype)
        block = self._block(-(-num_bytes // _GRAIN) * _GRAIN)
        self._taken += 1
        view = memoryview(block)
        weakref.finalize(view, self._returned.append, (self._taken, block)).atexit = False
        return torch.frombuffer(view, dtype=spec.dtype, count=count).view(spec.shape)

    def close(self) -> None:
        """Release the free blocks. Blocks in use are released with their tensors."""
        self._collect_returned()
        self._free.clear()
        self._free_bytes = 0

    def _block(self, size: int) -> mmap.mmap:
        self._collect_returned()
        self._used_bytes += size
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        for number in reversed(self._free):  # the most recently used is likeliest to be in the CPU's cache
            if len(self._free[number]) == size:
                self._free_bytes -= size
                return self._free.pop(number)
        while self._free and self._used_bytes + self._free_bytes > self._most_bytes:
            self._free_bytes -= len(self._free.popitem(last=False)[1])
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _collect_returned(self) -> None:
        while self._returned:
            number, block = self._returned.popleft()
            self._free[number] = block
            self._used_bytes -= len(block)
            self._free_bytes += len(block)
