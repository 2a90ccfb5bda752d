"""Prefetch: a thread that takes items from an iterator in advance."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any, Generic, TypeVar

from weft.conf.host.threads import Thread

T = TypeVar("T")

_POLL_S = 0.1
"""Seconds between checks of a thread with a full queue for a request to stop."""
_PATIENCE_S = 30.0
"""Longest time in seconds for which `close` waits for the thread, which may be waiting for storage."""


class Closed(Exception):
    """Raised in the thread of a prefetch that is being closed."""


def check_open() -> None:
    """Raise `Closed` if the prefetch of the current thread is being closed. Long work on an item calls this."""
    if isinstance(thread := threading.current_thread(), _Filler) and thread.stop.is_set():
        raise Closed


@dataclass(frozen=True)
class _End:
    """The queue's last entry, with the error to raise."""

    error: BaseException


class Prefetch(Iterator[T], Generic[T]):
    """Iterator over items that a thread prepares, up to ``depth`` in advance.

    An error of the source is raised in place of its item. The first ``next`` starts the thread. `close` or the garbage
    collection of this object stops it, and ends a ``next`` that waits in another thread.
    """

    def __init__(self, items: Iterable[T], depth: int, source: Prefetch[Any] | None = None) -> None:
        """Take over ``items``, which must not be used elsewhere from now on.

        Args:
            source: a prefetch that ``items`` reads. It is closed with this one.
        """
        assert depth > 0, depth
        self._queue: Queue[T | _End] = Queue(depth)
        self._stop = threading.Event()
        # The thread must not refer to this object. Otherwise it would never be collected.
        self._thread = _Filler(items, self._queue, self._stop)
        self._shut = weakref.finalize(self, _shut, self._queue, self._thread, source)

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
        """Stop the thread after the current item, or at its next `check_open`, and discard queued items."""
        self._shut()


class _Filler(Thread):
    """The thread of a prefetch."""

    def __init__(self, items: Iterable[Any], queue: Queue, stop: threading.Event) -> None:
        super().__init__(_fill, items, queue, stop, name="weft-prefetch")
        self.stop = stop


def _shut(queue: Queue, thread: _Filler, source: Prefetch[Any] | None) -> None:
    """Stop a thread. Also called at interpreter exit, when a thread inside native code could crash the process."""
    thread.stop.set()
    if source is not None:
        source.close()
    with suppress(Empty):
        while True:
            queue.get_nowait()
    with suppress(Full):
        queue.put_nowait(_End(StopIteration()))  # for a consumer that waits
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_PATIENCE_S)


def _fill(items: Iterable[T], queue: Queue, stop: threading.Event) -> None:
    try:
        for item in () if stop.is_set() else items:
            if not _put(queue, item, stop):
                break
        end: BaseException = StopIteration()
    except BaseException as error:  # passed on to the consumer
        end = error
    if isinstance(items, Generator):
        items.close()  # release its resources with this thread, not at a later garbage collection
    _put(queue, _End(end), stop)


def _put(queue: Queue, item: object, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            queue.put(item, timeout=_POLL_S)
            return True
        except Full:
            continue
    return False
