"""A tensor of the device on its way to the host, for which neither waits until it is read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class HostCopy:
    """Room for one tensor at a time.

    On a GPU it is copied on a stream of its own once it is there. When it is read a step later, the
    device already has another step's work.
    """

    def __init__(self, device: torch.device) -> None:
        """Copy from ``device``."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = None if self._stream is None else torch.cuda.Event()
        self._on_host: Tensor | None = None
        self._wait: Callable[[], Tensor] | None = None

    def send(self, wait: Callable[[], Tensor]) -> None:
        """Send what ``wait`` returns; on a GPU only the stream that is current in it waits."""
        self._wait = wait  # and so what it holds stays until it is read
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
        """Return the last copied value in host memory; blocks until it is there."""
        assert self._wait is not None, "nothing was sent"
        wait, self._wait = self._wait, None
        if self._arrived is None:
            return wait()
        self._arrived.synchronize()
        assert self._on_host is not None
        return self._on_host
