"""Liveness of a worker's engine and stages, published to the process that answers `/health`: words in a file.

vLLM's own health check notices ended processes only. Progress also depends on the thread that waits for bubbles, on the
engine loop that this thread wakes, and on stages, which may be stopped or hang.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic_ns, sleep

from weft.conf.host.shared_words import WORD_BYTES, make_words, publish

BEAT_S = 3.0
"""Longest interval at which the waker, and each stage, record that they run."""
STALE_S = 15.0
"""Seconds without a record after which they count as stopped."""
STUCK_S = 120.0
"""Seconds after which a woken engine counts as hung; longer than any step."""

_WOKEN, _LEAVING, _SERVING, _CHECKED = range(4)
_WORDS = 4
"""Words of a worker of one stage. With several, each has one more, with the time of its last record."""
_MOST_BYTES = 4096


class WorkerStatus:
    """The engine's side of the status file. Each method is one or two stores."""

    def __init__(self, path: Path | None, stages: int = 1) -> None:
        """Publish at ``path``. None disables publishing.

        Raises:
            OSError: it cannot be written.
            ValueError: its folder is not private to this user.
        """
        words = _WORDS + (stages if stages > 1 else 0)
        memory = make_words(path, words) if path is not None else bytearray(words * WORD_BYTES)
        self._words = memoryview(memory).cast("Q")
        if path is not None:
            publish(path)

    def checked(self) -> None:
        """Record that the waker runs."""
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
        self.checked()
        self._words[_SERVING] = 1

    def leave(self) -> None:
        """Record that the engine shuts down."""
        self._words[_LEAVING] = 1


def record_stage(path: Path, stage: int) -> Thread:
    """Start a thread that records in a worker's status that this process, one of its stages, runs."""

    def repeat() -> None:
        while True:
            record(path, stage)
            sleep(BEAT_S)

    thread = Thread(target=repeat, name="weft-stage", daemon=True)
    thread.start()
    return thread


def record(path: Path, stage: int) -> None:
    """Record in a worker's status that one of its stages runs."""
    with suppress(OSError):  # the engine has not made the file yet
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            begin = (_WORDS + stage) * WORD_BYTES
            if os.fstat(file).st_size > begin:  # otherwise it is an earlier worker's
                os.pwrite(file, monotonic_ns().to_bytes(WORD_BYTES, sys.byteorder), begin)
        finally:
            os.close(file)


def is_leaving(path: Path) -> bool:
    """True if the engine that publishes at ``path`` shuts down, or has done so."""
    try:
        words = _read(path)
    except OSError:
        return False
    return len(words) >= _WORDS and bool(words[_LEAVING])


def problem_of(path: Path, now_ns: int) -> str:
    """Return why the engine that publishes at ``path`` makes no progress, or empty if it does or never published."""
    try:
        words = _read(path)
    except OSError:
        return ""
    if len(words) < _WORDS:
        return f"{path}: not the status of a prefill worker; remove it"
    if not words[_SERVING]:
        return "the engine computes its first prompts; ask again in a few seconds"
    if words[_WOKEN] and (silent_s := (now_ns - words[_WOKEN]) / 1e9) > STUCK_S:
        return f"the engine has not responded for {silent_s:.0f} s since it was woken"
    if (silent_s := (now_ns - words[_CHECKED]) / 1e9) > STALE_S:
        return f"the thread that waits for bubbles has not run for {silent_s:.0f} s"
    for stage, recorded_ns in enumerate(words[_WORDS:]):
        if recorded_ns and (silent_s := (now_ns - recorded_ns) / 1e9) > STALE_S:
            return f"stage {stage} has not run for {silent_s:.0f} s"
    return ""


def _read(path: Path) -> memoryview:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_size < WORD_BYTES:
            return memoryview(b"")
        memory = os.pread(file, _MOST_BYTES, 0)
    finally:
        os.close(file)
    return memoryview(memory[: len(memory) // WORD_BYTES * WORD_BYTES]).cast("Q")
