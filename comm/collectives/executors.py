"""In-order executors for the steps of one mesh axis, concurrent to compute and to other axes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from weft.conf.host.threads import executor

Work = Callable[[Tensor], Tensor]
"""One step: maps the previous step's result to its own."""


class Pending(Protocol):
    """The future result of a submitted step."""

    def result(self) -> Tensor:
        """Wait for the tensor and return it. On a GPU only the current stream waits."""
        ...


class InOrderExecutor(Protocol):
    """Runs steps in submission order."""

    def submit(self, work: Work, after: Pending) -> Pending:
        """Run ``work`` on the result of ``after``, and return without waiting for it."""
        ...

    def close(self) -> None:
        """Accept no more steps."""
        ...


class ThreadExecutor:
    """An executor for CPU collectives: a thread, because they block their caller."""

    def __init__(self, name: str) -> None:
        self._thread = executor(name)

    def submit(self, work: Work, after: Pending) -> Future[Tensor]:
        """Run ``work`` on the result of ``after``, and return without waiting for it."""
        return self._thread.submit(lambda: work(after.result()))

    def close(self) -> None:
        """Accept no more steps."""
        self._thread.shutdown(wait=False)


class StreamExecutor:
    """An executor on a CUDA stream. The host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Work, after: Pending) -> StreamResult:
        """Queue ``work`` on the result of ``after``, and return without waiting for it."""
        with torch.cuda.stream(self._stream):
            return StreamResult(work(after.result()))

    def close(self) -> None:
        """No-op: queued steps still run."""


class HostedStreamExecutor:
    """An executor for collectives between sites, which block their host thread: a thread with a CUDA stream."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._stream = torch.cuda.Stream(device)
        self._thread = executor(name)

    def submit(self, work: Work, after: Pending) -> HostedResult:
        """Run ``work`` on the result of ``after``, and return without waiting for it."""
        return HostedResult(self._thread.submit(self._run, work, after))

    def _run(self, work: Work, after: Pending) -> StreamResult:
        with torch.cuda.stream(self._stream):
            return StreamResult(work(after.result()))

    def close(self) -> None:
        """Accept no more steps."""
        self._thread.shutdown(wait=False)


class HostedResult:
    """The result of an operation that a thread launches on its CUDA stream."""

    def __init__(self, started: Future[StreamResult]) -> None:
        self._started = started

    def result(self) -> Tensor:
        """Block until the thread has launched the operation, make the current stream wait, and return the tensor."""
        return self._started.result().result()


class StreamResult:
    """A tensor that the current stream's queued work produces."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event = torch.cuda.current_stream(tensor.device).record_event()

    def result(self) -> Tensor:
        """Make the current stream wait for the tensor, and return it.

        Its memory is not reused before that stream has executed what is queued when the tensor is freed.
        """
        stream = torch.cuda.current_stream(self._tensor.device)
        stream.wait_event(self._event)
        self._tensor.record_stream(stream)
        return self._tensor


def completed(tensor: Tensor) -> Pending:
    """Wrap a tensor that is available, or that the current stream is about to produce, as a result."""
    if tensor.is_cuda:
        return StreamResult(tensor)
    ready: Future[Tensor] = Future()
    ready.set_result(tensor)
    return ready


def executor_for(device: torch.device, name: str, *, holds_host: bool = False) -> InOrderExecutor:
    """Create the executor for a device.

    Args:
        holds_host: True if a collective on a GPU returns only when it is done.
    """
    if device.type != "cuda":
        return ThreadExecutor(name)
    return HostedStreamExecutor(device, name) if holds_host else StreamExecutor(device)
