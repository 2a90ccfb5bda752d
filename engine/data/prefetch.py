"""Prefetch: a thread that takes items from an iterator in advance."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

from weft.conf.host.threads import Thread

T = TypeVar("T")

_POLL_S = 0.1
"""Seconds between checks of a thread with a full queue for a request to stop."""
_PATIENCE_S = 30.0
"""Longest time in seconds for which `close` waits for the thread."""


@dataclass(frozen=True)
class _End:
    """The queue's last entry, with the error to raise."""

    error: BaseException


class Prefetch(Iterator[T], Generic[T]):
    """Iterator over items that a thread prepares, up to ``depth`` in advance.

    An error of the source is raised in place of its item. The first ``next`` starts the thread. `close` or the garbage
    collection of this object stops it.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        """Take over ``items``, which must not be used elsewhere from now on."""
        assert depth > 0, depth
        self._queue: Queue[T | _End] = Queue(depth)
        self._stop = threading.Event()
        # The thread must not refer to this object. Otherwise it would never be collected.
        self._thread = Thread(_fill, items, self._queue, self._stop, name="weft-prefetch")
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
        """Stop the thread after the current item, and discard queued items."""
        self._shut()


def _shut(queue: Queue, stop: threading.Event, thread: threading.Thread) -> None:
    """Stop a thread. Also called at interpreter exit, when a thread inside native code could crash the process."""
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
