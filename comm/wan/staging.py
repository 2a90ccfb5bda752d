"""Host memory beside a tensor: the tensor itself on a CPU, a pinned copy for a GPU's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.channel import TensorSpec
from weft.comm.wan.reused_memory import ReusedMemory


class Staging(Protocol):
    """How tensors of one device get into host memory, where the transport reads and writes."""

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Call ``submit`` on host memory once it holds ``tensor``, in the order of calls."""
        ...

    def room(self, spec: TensorSpec) -> Tensor:
        """Host memory to receive into."""
        ...

    def inward(self, host: Tensor) -> Tensor:
        """The received tensor on the device; on a GPU only the current stream waits for the copy."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


class HostStaging:
    """Tensors that are in host memory already."""

    def __init__(self) -> None:
        """Begin without memory."""
        self._memory = ReusedMemory()

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Submit at once; a tensor that is not contiguous is copied."""
        done: Future[list[int]] = Future()
        done.set_result(submit(tensor.contiguous()))
        return done

    def room(self, spec: TensorSpec) -> Tensor:
        """The tensor itself, in memory of one that is gone where there is any."""
        return self._memory.tensor(spec)

    def inward(self, host: Tensor) -> Tensor:
        """The tensor itself."""
        return host

    def close(self) -> None:
        """Nothing runs; memory that is not in use is let go of."""
        self._memory.close()


STOCK = 8
"""Blocks of pinned memory that are taken at once: as many messages as are usually under way."""


class PinnedStock:
    """Takes pinned memory from the system for several messages at once, before the first of their size.

    Pinning waits for the device, and may wait behind kernels that wait for other ranks. A step begins
    with its receives, when the device has nothing to do; what it sends later finds its memory here, in
    torch's cache of pinned blocks, which are of sizes that are powers of two.
    """

    def __init__(self, pin: Callable[[int], object]) -> None:
        """``pin`` takes a block of so many bytes, and its cache keeps it when the result is gone."""
        self._pin = pin
        self._stocked: set[int] = set()

    def prepare(self, num_bytes: int) -> None:
        """See to it that messages of ``num_bytes`` need no new memory."""
        size = 1 << (num_bytes - 1).bit_length() if num_bytes else 0
        if size and size not in self._stocked:
            self._stocked.add(size)
            blocks = [self._pin(size) for _ in range(STOCK)]
            del blocks


class CudaStaging:
    """Pinned copies on streams of their own, one per direction; compute never waits for them.

    Torch's pinned memory comes from a cache that knows which copies still use a block.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the streams, and the thread that waits for copies to the host."""
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="weft wan staging")
        self._stock = PinnedStock(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Copy behind what the current stream has queued; a thread submits when the copy has ended."""
        tensor = tensor.contiguous()
        host = self.room(TensorSpec(tuple(tensor.shape), tensor.dtype))
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

    def room(self, spec: TensorSpec) -> Tensor:
        """Pinned memory."""
        self._stock.prepare(spec.dtype.itemsize * torch.Size(spec.shape).numel())
        return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=True)

    def inward(self, host: Tensor) -> Tensor:
        """Copy to the device; the current stream waits, the host does not."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._in):
            tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            tensor.copy_(host, non_blocking=True)
        current.wait_stream(self._in)
        tensor.record_stream(current)
        return tensor

    def close(self) -> None:
        """End the thread."""
        self._waiter.shutdown(cancel_futures=True)


def staging(device: torch.device) -> Staging:
    """What fits ``device``."""
    return CudaStaging(device) if device.type == "cuda" else HostStaging()
