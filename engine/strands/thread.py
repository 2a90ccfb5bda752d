"""A thread that lives as long as the engine and runs one strand of each pair."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TypeVar

import torch

Result = TypeVar("Result")
CLOSING_S = 5.0
"""Timeout of `StrandThread.close` in seconds, because the thread may wait for a lost rank."""


class StrandThread:
    """A thread that runs functions one after the other.

    Autograd's own threads are disabled in it. On a GPU all backwards would share autograd's thread for the device, and
    a strand that waits there would block the others.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the thread, with ``device`` as its current device."""
        self._device = device
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weft strand", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """Start to run ``job`` on the caller's current stream, and return the future of its result.

        Both strands then compute, allocate and free on one stream, so that memory is reused without
        synchronisation. Collectives have streams of their own.
        """
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        future: Future[Result] = Future()

        def run() -> None:
            try:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    result = job()
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        """End the thread. If it waits for a lost rank, it ends later, when its process group is aborted."""
        self._jobs.put(None)
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with torch.autograd.set_multithreading_enabled(False):
            while (job := self._jobs.get()) is not None:
                job()
                del job  # an idle thread keeps no tensors
