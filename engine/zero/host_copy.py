"""Asynchronous copies of a device's tensor to host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class HostCopy:
    """A buffer in host memory for one tensor at a time.

    On a GPU the copy runs on a stream of its own. It is read a step later, when the device already has another
    step's work, so that neither waits.
    """

    def __init__(self, device: torch.device) -> None:
        """Copy from ``device``."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = None if self._stream is None else torch.cuda.Event()
        self._on_host: Tensor | None = None
        self._wait: Callable[[], Tensor] | None = None

    def send(self, wait: Callable[[], Tensor]) -> None:
        """Start to copy the result of ``wait``. On a GPU only the stream that is current in ``wait`` waits."""
        self._wait = wait  # keeps the tensor alive until it is read
        if self._stream is None or self._arrived is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            source = wait()
            if self._on_host is None or self._on_host.shape != source.shape:
                self._on_host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._on_host.copy_(source, non_blocking=True)
            self._arrived.record(self._stream)

    def read(self) -> Tensor:
        """Return the last copied value in host memory. Blocks until it has arrived."""
        assert self._wait is not None, "nothing was sent"
        wait, self._wait = self._wait, None
        if self._arrived is None:
            return wait()
        self._arrived.synchronize()
        assert self._on_host is not None
        return self._on_host
