"""A thread that lives as long as the engine and runs one strand of each pair."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

Result = TypeVar("Result")


class StrandThread:
    """Runs what it is given, one after the other.

    Autograd's own threads are off in it: on a GPU a backward runs in the device's thread, of which
    there is one, and a strand that pauses there would keep all others from running.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the thread, on a device and its current stream."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, args=(device, stream), name="weft strand", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """Start a job; the future holds what it returns or raises."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream)
        with torch.autograd.set_multithreading_enabled(False):
            while (job := self._jobs.get()) is not None:
                job()
