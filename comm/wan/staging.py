"""Staging in host memory: the tensor itself on a CPU, a pinned copy on a GPU."""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.channel import TensorSpec
from weft.conf.host.threads import executor

LEAST_BYTES = 128 << 10
"""Smaller tensors are left to torch, whose allocator reuses memory of this size."""
_GRAIN = 64 << 10  # sizes are rounded up to a multiple, so that similar ones share blocks


class ReusedMemory:
    """Memory blocks, free or in use. Their total size never exceeds the peak in use."""

    def __init__(self) -> None:
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


class Staging(Protocol):
    """Moves tensors of a device to and from host memory, which the transport reads and writes."""

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Copy ``tensor`` to host memory, then call ``submit`` with the copy. Calls are processed in order."""
        ...

    def receive_buffer(self, spec: TensorSpec) -> Tensor:
        """Allocate host memory to receive into."""
        ...

    def inward(self, host: Tensor) -> Tensor:
        """Copy a received tensor to the device; on a GPU only the current stream waits."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...


class HostStaging:
    """Staging for CPU tensors, which need no copy."""

    def __init__(self) -> None:
        self._memory = ReusedMemory()

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Submit immediately. Only a non-contiguous tensor is copied."""
        done: Future[list[int]] = Future()
        done.set_result(submit(tensor.contiguous()))
        return done

    def receive_buffer(self, spec: TensorSpec) -> Tensor:
        """Return the tensor to receive into, from the cache of reused memory."""
        return self._memory.tensor(spec)

    def inward(self, host: Tensor) -> Tensor:
        """Return ``host`` itself."""
        return host

    def close(self) -> None:
        """Release unused memory."""
        self._memory.close()


BLOCKS_PER_SIZE = 8
"""Pinned blocks to allocate together: about as many as there are messages in flight."""


class PinnedPreallocation:
    """Allocates pinned memory for several messages in advance, when the first message of their size is prepared.

    Pinning synchronises with the device, possibly with kernels that wait for other ranks. A step
    begins with its receives, while the device is idle; later sends then find memory in torch's
    caching host allocator, whose blocks are powers of two.
    """

    def __init__(self, pin: Callable[[int], object]) -> None:
        """Create the preallocation. ``pin(num_bytes)`` allocates a block from a caching allocator."""
        self._pin = pin
        self._allocated_sizes: set[int] = set()

    def prepare(self, num_bytes: int) -> None:
        """Ensure that messages of ``num_bytes`` need no new pinned memory."""
        size = 1 << (num_bytes - 1).bit_length() if num_bytes else 0
        if size and size not in self._allocated_sizes:
            self._allocated_sizes.add(size)
            blocks = [self._pin(size) for _ in range(BLOCKS_PER_SIZE)]
            del blocks


class CudaStaging:
    """Staging by pinned copies, on one stream per direction. Compute does not wait for them.

    torch's caching host allocator tracks which copies still use a block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._waiter = executor("weft wan staging")
        self._pinned = PinnedPreallocation(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Copy after the current stream's queued work. A thread calls ``submit`` when the copy is complete."""
        tensor = tensor.contiguous()
        if not tensor.is_cuda:  # such as a probe's
            return self._waiter.submit(submit, tensor)
        host = self.receive_buffer(TensorSpec(tuple(tensor.shape), tensor.dtype))
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            copied.record()
        tensor.record_stream(self._out)

        def finish() -> list[int]:
            copied.synchronize()
            return submit(host)

        return self._waiter.submit(finish)

    def receive_buffer(self, spec: TensorSpec) -> Tensor:
        """Allocate pinned memory."""
        self._pinned.prepare(spec.dtype.itemsize * torch.Size(spec.shape).numel())
        return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=True)

    def inward(self, host: Tensor) -> Tensor:
        """Copy to the device; only the current stream waits."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._in):
            tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            tensor.copy_(host, non_blocking=True)
        current.wait_stream(self._in)
        tensor.record_stream(current)
        return tensor

    def close(self) -> None:
        """Stop the thread."""
        self._waiter.shutdown(cancel_futures=True)


def staging(device: torch.device) -> Staging:
    """Create the staging for ``device``."""
    return CudaStaging(device) if device.type == "cuda" else HostStaging()
