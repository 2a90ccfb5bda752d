"""Liveness of a worker's engine, published to the process that answers `/health`: five words in a file.

vLLM's own health check covers the engine's process only. Progress also depends on the thread that
waits for bubbles, and on the engine loop that this thread wakes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from time import monotonic_ns

from weft.conf.host.shared_words import WORD_BYTES, make_words, publish

STALE_S = 15.0
"""Seconds after which a waker, which checks every quarter of a second, counts as dead."""
STUCK_S = 120.0
"""Seconds after which a woken engine counts as hung; longer than any step."""

_ARMED, _CHECKED, _WOKEN, _LEAVING, _SERVING = range(5)
_WORDS = 5


class WorkerStatus:
    """The engine's side of the status file. Each method is one or two stores."""

    def __init__(self, path: Path | None) -> None:
        """Publish at ``path``. None disables publishing.

        Raises:
            OSError: it cannot be written.
            ValueError: its folder is not private to this user.
        """
        memory = make_words(path, _WORDS) if path is not None else bytearray(_WORDS * WORD_BYTES)
        self._words = memoryview(memory).cast("Q")
        if path is not None:
            publish(path)

    def arm(self, has_work: bool) -> None:
        """Set whether there are requests that wait for bubbles."""
        if has_work and not self._words[_ARMED]:
            self._words[_CHECKED] = monotonic_ns()
        self._words[_ARMED] = has_work

    def checked(self) -> None:
        """Record that the waker has checked the boards."""
        self._words[_CHECKED] = monotonic_ns()

    def woke(self) -> None:
        """Record that the waker has woken the engine."""
        if not self._words[_WOKEN]:
            self._words[_WOKEN] = monotonic_ns()

    def looped(self) -> None:
        """Record that the engine's loop has made an iteration."""
        self._words[_WOKEN] = 0

    def serve(self) -> None:
        """Record that the engine computes requests from now on."""
        self._words[_SERVING] = 1

    def leave(self) -> None:
        """Record that the engine shuts down."""
        self._words[_LEAVING] = 1


def is_leaving(path: Path) -> bool:
    """True if the engine that publishes at ``path`` shuts down, or has done so."""
    try:
        words = _read(path)
    except OSError:
        return False
    return len(words) == _WORDS and bool(words[_LEAVING])


def problem_of(path: Path, now_ns: int) -> str:
    """Return why the engine that publishes at ``path`` makes no progress, or empty if it does or never published."""
    try:
        words = _read(path)
    except OSError:
        return ""
    if len(words) < _WORDS:
        return f"{path}: not the status of a prefill worker; remove it"
    if words[_WOKEN] and (silent_s := (now_ns - words[_WOKEN]) / 1e9) > STUCK_S:
        return f"the engine has not responded for {silent_s:.0f} s since it was woken"
    if words[_ARMED] and (silent_s := (now_ns - words[_CHECKED]) / 1e9) > STALE_S:
        return f"the thread that waits for bubbles has not run for {silent_s:.0f} s"
    return "" if words[_SERVING] else "the engine computes its first prompts; ask again in a few seconds"


def _read(path: Path) -> memoryview:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_size < WORD_BYTES:
            return memoryview(b"")
        memory = os.pread(file, _WORDS * WORD_BYTES, 0)
    finally:
        os.close(file)
    return memoryview(memory[: len(memory) // WORD_BYTES * WORD_BYTES]).cast("Q")
