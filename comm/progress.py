"""A thread that runs submitted calls in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch


class Progress:
    """Runs one function after the other on a thread of its own; after an error it runs no other.

    Attributes:
        error: the first error, or None without one.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, which never holds the process up."""
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future | None]] = SimpleQueue()
        self._pending: set[Future] = set()
        self._name = name
        self._closed: Exception | None = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future:
        """Run ``function`` after the previous ones; it fails if the thread has ended before."""
        future: Future = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._queue.put((function, future))
        if (error := self.error or self._closed) is not None:
            _fail(future, error)
        return future

    def fail(self, error: Exception) -> None:
        """Fail all calls that have not ended, from any thread; the result of a running one is discarded."""
        self.error = self.error or error
        self._fail_pending(self.error)

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """End the thread after the submitted calls and ``last``, which runs even after an error."""
        self._queue.put((last or _nothing, None))

    def _run(self) -> None:
        while True:
            function, future = self._queue.get()
            if future is None:
                break
            try:
                if self.error is not None:
                    raise self.error
                with torch.no_grad():
                    result = function()
            except Exception as error:
                self.fail(error)
            else:
                with suppress(InvalidStateError):  # it has failed meanwhile
                    future.set_result(result)
                del result
            del function, future
        self._closed = RuntimeError(f"{self._name} is closed")
        self._fail_pending(self._closed)  # submitted too late to run
        with torch.no_grad(), suppress(Exception):  # there is no caller to raise to
            function()

    def _fail_pending(self, error: Exception) -> None:
        for future in list(self._pending):
            _fail(future, error)


def _nothing() -> None:
    """Do nothing: the default of ``last`` in `Progress.close`."""


def _fail(future: Future, error: Exception) -> None:
    with suppress(InvalidStateError):  # it has ended
        future.set_exception(error)
