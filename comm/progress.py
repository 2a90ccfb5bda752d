"""A thread that runs submitted calls in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from weft.conf.host.threads import Thread


class Progress:
    """A thread that runs submitted functions in order. After an error it runs no further function.

    Attributes:
        error: the first error, or None.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, as a daemon, so that it never delays the end of the process."""
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future | None]] = SimpleQueue()
        self._pending: set[Future] = set()
        self._name = name
        self._closed: Exception | None = None
        self.error: Exception | None = None
        Thread(self._run, name=name).start()

    def submit(self, function: Callable[[], Any]) -> Future:
        """Run ``function`` after the previous ones. Its future fails if one of those failed, or after `close`."""
        future: Future = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._queue.put((function, future))
        if (error := self.error or self._closed) is not None:
            _fail(future, error)
        return future

    def fail(self, error: Exception) -> None:
        """Fail all submitted calls that have not completed. The result of the running one is discarded. Thread-safe."""
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
                with suppress(InvalidStateError):  # `fail` has failed it meanwhile
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
    with suppress(InvalidStateError):  # it has completed
        future.set_exception(error)
