"""The driver's journal: what happened to a run, one JSON object a line, on disk before anyone acts on it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.conf.private import make_run_folder, write_private

NAME = Path("supervisor", "journal.jsonl")
"""Where a run's folder has it."""
PATIENCE_S = 1.0
"""Seconds that a driver waits for the disk: agents give up a driver that does not answer for several."""


class Journal:
    """Appends events and waits for the disk; a disk that is full or hangs delays lines and does not stop the run.

    Lines that a crash of the machine has damaged are left out, because the others suffice for a driver to go on.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open ``path`` to append, and cut off a last line that a crash has left unfinished.

        Raises:
            ValueError: too much of it is damaged to go on from.
            OSError: the file cannot be opened.
        """
        make_run_folder(path.parent)
        self.path = path
        damaged = list[str]()
        self.past: list[dict[str, Any]] = read_journal(path, damaged)
        if damaged and not {"launch", "attempt"} & {event["event"] for event in self.past}:
            raise ValueError(f"{path}: {damaged[0]}, and no launch or attempt is left; move the file away")
        if damaged:
            _set_aside(path, self.past, damaged[0])
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._size = _whole_bytes(path)
        os.ftruncate(self._file, self._size)
        self._waiting, self._is_late = b"", False
        self._thread = ThreadPoolExecutor(1, "journal")
        self._writing: Future[int] | None = None

    def record(self, event: str, **fields: Any) -> None:
        """Append an event with the time of day; when this returns it is on disk, or waits for a disk that is late."""
        line = json.dumps({"at": round(self._clock(), 3), "event": event, **fields}) + "\n"
        self._waiting += line.encode()
        self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet; wait for a write at most `PATIENCE_S`, and not again while it hangs."""
        while self._waiting:
            if self._writing is None:
                self._writing = self._thread.submit(self._write, self._waiting, self._size)
                wait([self._writing], PATIENCE_S)
            if not self._writing.done():
                return self._complain(f"nothing was written for {PATIENCE_S:g} s")
            writing, self._writing = self._writing, None
            try:
                written = writing.result()
            except OSError as error:
                return self._complain(str(error.strerror))
            self._size += written
            self._waiting, self._is_late = self._waiting[written:], False

    def _write(self, data: bytes, at: int) -> int:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], at + written)
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):  # such as a file system that has become read-only
                os.ftruncate(self._file, at)
            raise
        return written

    def _complain(self, problem: str) -> None:
        if not self._is_late:
            print(f"weft: {self.path}: {problem}; its next lines wait", file=sys.stderr, flush=True)
        self._is_late = True

    def close(self) -> None:
        """Write what waits, however long the disk takes, and close the file."""
        if self._writing is not None:
            wait([self._writing])
        self.flush()
        self._thread.shutdown()
        os.close(self._file)


def read_journal(path: Path, damaged: list[str] | None = None) -> list[dict[str, Any]]:
    """The events of a journal, oldest first; none where there is no file. An unfinished last line is left out.

    Args:
        damaged: gets what is wrong with lines before the last; None makes that an error.

    Raises:
        ValueError: a line before the last is no JSON object.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("no event")
        except (ValueError, RecursionError) as error:
            if damaged is None:
                raise ValueError(f"{path}: line {number} is damaged ({error}); move the file away") from error
            damaged.append(f"line {number} is damaged ({error})")
            continue
        events.append(event)
    return events


def _set_aside(path: Path, events: list[dict[str, Any]], problem: str) -> None:
    """Keep a damaged journal alongside one of its sound lines."""
    aside = path.with_suffix(".damaged")
    os.replace(path, aside)
    write_private(path, "".join(json.dumps(event) + "\n" for event in events))
    print(f"weft: {path}: {problem}; the driver goes on from the others, and it lies in {aside}", file=sys.stderr)


def _whole_bytes(path: Path) -> int:
    """Length of the file up to its last whole line."""
    return path.read_bytes().rfind(b"\n") + 1
