"""Host memory beside a tensor: the tensor itself on a CPU, a pinned copy for a GPU's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.channel import TensorSpec


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

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Submit at once; a tensor that is not contiguous is copied."""
        done: Future[list[int]] = Future()
        done.set_result(submit(tensor.contiguous()))
        return done

    def room(self, spec: TensorSpec) -> Tensor:
        """The tensor itself."""
        return torch.empty(spec.shape, dtype=spec.dtype)

    def inward(self, host: Tensor) -> Tensor:
        """The tensor itself."""
        return host

    def close(self) -> None:
        """Nothing runs."""


class CudaStaging:
    """Pinned copies on streams of their own, one per direction; compute never waits for them.

    Torch's pinned memory comes from a cache that knows which copies still use a block.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the streams, and the thread that waits for copies to the host."""
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="weft wan staging")

    def outward(self, tensor: Tensor, submit: Callable[[Tensor], list[int]]) -> Future[list[int]]:
        """Copy behind what the current stream has queued; a thread submits when the copy has ended."""
        tensor = tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
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
