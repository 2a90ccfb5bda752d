"""Lanes: where the steps of one axis run, one after the other, beside compute and other axes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[Tensor], Tensor]
"""One step: from what the step before it left to its own result."""


class Pending(Protocol):
    """A result that is on its way."""

    def result(self) -> Tensor:
        """Wait for it; on a GPU, make the current stream wait."""
        ...

    def done(self) -> bool:
        """Whether waiting would return at once."""
        ...


class Lane(Protocol):
    """Runs steps in the order in which they were submitted."""

    def submit(self, work: Work, after: Pending) -> Pending:
        """Run ``work`` on the result of ``after``; returns at once."""
        ...

    def close(self) -> None:
        """Accept no more steps."""
        ...


class ThreadLane:
    """A thread that waits for CPU collectives, since they block the one who waits."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, work: Work, after: Pending) -> Future[Tensor]:
        """Run ``work`` on the result of ``after``; returns at once."""
        return self._thread.submit(lambda: work(after.result()))

    def close(self) -> None:
        """Accept no more steps."""
        self._thread.shutdown(wait=False)


class StreamLane:
    """A CUDA stream: steps are queued on it, and nothing on the host waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Work, after: Pending) -> StreamResult:
        """Run ``work`` on the result of ``after``; returns at once."""
        with torch.cuda.stream(self._stream):
            tensor = after.result()
            tensor.record_stream(self._stream)
            return StreamResult(work(tensor))

    def close(self) -> None:
        """Nothing to do: what is queued still runs."""


class StreamResult:
    """A tensor that work queued on the current stream will fill."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event = torch.cuda.current_stream(tensor.device).record_event()

    def result(self) -> Tensor:
        """Make the current stream wait for it."""
        self._event.wait()
        return self._tensor

    def done(self) -> bool:
        """Whether it is there."""
        return self._event.query()


def at_once(tensor: Tensor) -> Pending:
    """A result that is there, or that the current stream is about to make."""
    if tensor.is_cuda:
        return StreamResult(tensor)
    ready: Future[Tensor] = Future()
    ready.set_result(tensor)
    return ready


def lane_for(device: torch.device, name: str) -> Lane:
    """The lane of a device."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
