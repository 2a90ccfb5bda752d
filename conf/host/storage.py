"""Storage that may hang: calls with a timeout, and values that can be read meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from errno import ETIMEDOUT
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
STORAGE_TIMEOUT_S = 1.0
"""Timeout for a write or read in seconds. It is short, because agents give up a driver that does not answer."""


class StorageHangs(TimeoutError, ValueError):
    """Storage has not answered in time. Training and the caller go on; a later call may succeed."""


class Storage:
    """Calls functions that use storage on a thread, so that storage that hangs does not stop an event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[Any, Future[Any]] | None = None

    def call(self, function: Callable[..., T], *arguments: Any, limit_s: float | None = STORAGE_TIMEOUT_S) -> T:
        """Return the result of a function, or that of the last call if it was the same call and came late.

        A late error of another call is logged, because the caller of that one has had `StorageHangs`.

        Args:
            limit_s: seconds to wait, or None to wait without a timeout.

        Raises:
            StorageHangs: there is no result in time, or an earlier call still hangs.
        """
        call, is_new = (function, arguments), self._last is None
        if self._last is None:
            self._last = call, Future()
            Thread(target=_fill, args=(self._last[1], call), name="weft-storage", daemon=True).start()
        known, result = self._last
        wait([result], limit_s if is_new or limit_s is None else 0)
        if not result.done():
            raise StorageHangs(ETIMEDOUT, f"storage has not answered for {STORAGE_TIMEOUT_S:g} s", str(self._path))
        self._last = None
        if known == call:
            return result.result()
        if (error := result.exception()) is not None:
            name = getattr(known[0], "__name__", str(known[0]))
            log.warning("%s: a call of %s that had not answered in time failed: %r", self._path, name, error)
        return self.call(function, *arguments, limit_s=limit_s)


def _fill(result: Future[Any], call: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    function, arguments = call
    try:
        result.set_result(function(*arguments))
    except BaseException as error:  # on its own thread even SystemExit ends nothing but the call
        result.set_exception(error)


class TimedRead(Generic[T]):
    """A value in storage that can be read while storage hangs."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        """Read the value once, without a timeout. ``read`` must not raise."""
        self._read, self._storage, self._value = read, Storage(path), read()

    def __call__(self) -> T:
        """Return the value in storage, or the last one while a read hangs."""
        with suppress(StorageHangs):
            self._value = self._storage.call(self._read)
        return self._value
