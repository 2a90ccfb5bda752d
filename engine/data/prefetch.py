"""Prefetch: the items of an iterator, made ahead of need by a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")

_POLL_S = 0.1
"""How often a thread with a full queue looks whether its items are still wanted."""
_PATIENCE_S = 30.0
"""How long closing waits for the item at hand."""


@dataclass(frozen=True)
class _End:
    """Stands behind the last item."""

    error: BaseException


class Prefetch(Iterator[T], Generic[T]):
    """At most ``depth`` items wait; an error of the source is raised where its item would have come.

    The thread starts with the first ``next``, and ends with `close` or when nobody refers to
    this object any more.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        """Draw from ``items``, which no one else may touch from here on."""
        assert depth > 0, depth
        self._queue: Queue[T | _End] = Queue(depth)
        self._stop = threading.Event()
        # The thread must not refer to this object, or it would never be collected.
        self._thread = threading.Thread(
            target=_fill, args=(items, self._queue, self._stop), name="weft-prefetch", daemon=True
        )
        self._shut = weakref.finalize(self, _shut, self._queue, self._stop, self._thread)

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        if self._thread.ident is None:
            self._thread.start()
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self._stop.set()
        raise item.error

    def close(self) -> None:
        """Stop the thread once it has made the item at hand; waiting items are lost."""
        self._shut()


def _shut(queue: Queue, stop: threading.Event, thread: threading.Thread) -> None:
    """End a thread, also at the interpreter's exit, where a thread left inside native code can crash it."""
    stop.set()
    with suppress(Empty):
        while True:
            queue.get_nowait()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_PATIENCE_S)


def _fill(items: Iterable[T], queue: Queue, stop: threading.Event) -> None:
    try:
        for item in items:
            if not _put(queue, item, stop):
                break
        end: BaseException = StopIteration()
    except BaseException as error:  # handed to the consumer, whatever it is
        end = error
    if isinstance(items, Generator):
        items.close()  # what it holds ends with this thread, not with some later collection
    _put(queue, _End(end), stop)


def _put(queue: Queue, item: object, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            queue.put(item, timeout=_POLL_S)
            return True
        except Full:
            continue
    return False
