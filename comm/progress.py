"""A thread that does what is submitted, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch


class Progress:
    """Runs one function after the other on a thread of its own; after an error it runs no other.

    Attributes:
        error: the first; None as long as there is none.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, which never holds the process up."""
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future] | None] = SimpleQueue()
        self.error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future:
        """Run ``function`` when those before it have ended."""
        future: Future = Future()
        self._queue.put((function, future))
        return future

    def close(self) -> None:
        """End the thread, after what was submitted."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            function, future = item
            try:
                if self.error is not None:
                    raise self.error
                with torch.no_grad():
                    future.set_result(function())
            except Exception as error:
                self.error = error
                future.set_exception(error)
            del item, function, future
