"""What a worker's engine says of itself to the process that answers `/health`: four words in a file.

vLLM's own health says that the engine's process lives. Whether it would compute anything also hangs
on the thread that waits for bubbles, and on the loop that this thread wakes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from time import monotonic_ns

from weft.inference.board.layout import WORD_BYTES, make_board, publish

STALE_S = 15.0
"""A waker looks around every quarter of a second; after this long it is taken for dead, not for slow."""
STUCK_S = 120.0
"""Longest time in which an engine that was woken may do nothing: more than any step takes."""

_ARMED, _LOOKED, _WOKEN = range(3)
_WORDS = 4


class WorkerStatus:
    """The engine's side; each method is a store or two."""

    def __init__(self, path: Path | None) -> None:
        """Publish at ``path``; None publishes nothing.

        Raises:
            OSError: it cannot be written.
            ValueError: its folder is not this user's alone.
        """
        memory = make_board(path, _WORDS) if path is not None else bytearray(_WORDS * WORD_BYTES)
        self._words = memoryview(memory).cast("Q")
        if path is not None:
            publish(path)

    def arm(self, has_work: bool) -> None:
        """Whether there is anything to wait for bubbles with."""
        if has_work and not self._words[_ARMED]:
            self._words[_LOOKED] = monotonic_ns()
        self._words[_ARMED] = has_work

    def looked(self) -> None:
        """The waker has looked around."""
        self._words[_LOOKED] = monotonic_ns()

    def woke(self) -> None:
        """The waker has sent the engine a message."""
        if not self._words[_WOKEN]:
            self._words[_WOKEN] = monotonic_ns()

    def passed(self) -> None:
        """The engine's loop has come round."""
        self._words[_WOKEN] = 0


def problem_of(path: Path, now_ns: int) -> str:
    """Why the engine that publishes at ``path`` computes nothing; empty if it does, or says nothing yet."""
    try:
        words = _read(path)
    except OSError:
        return ""
    if len(words) < _WORDS:
        return f"{path}: not the status of a prefill worker; remove it"
    if words[_WOKEN] and (silent_s := (now_ns - words[_WOKEN]) / 1e9) > STUCK_S:
        return f"the engine has not come round for {silent_s:.0f} s after it was woken"
    if words[_ARMED] and (silent_s := (now_ns - words[_LOOKED]) / 1e9) > STALE_S:
        return f"the thread that waits for bubbles has not looked for {silent_s:.0f} s"
    return ""


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
