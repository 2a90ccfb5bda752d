"""Output of processes: forwarded to the terminal, stored in a file, with the last lines for reports."""

from __future__ import annotations

import asyncio
import io
import os
import queue
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from weft.conf.host.threads import Thread

KEPT_LINES = 20
_MOST_OF_A_LINE = 500
_MOST_OF_AN_ANSWER = 1 << 22
_PIECE = 1 << 16
REPEATED_S = 30.0
"""Seconds in which a message of one process is not shown for another one."""
_LEAST_OF_A_MESSAGE = 20
_MOST_REMEMBERED = 500
_MOST_AT_THE_END = 1 << 22
_MOST_LINES = 2000
"""Most lines of a rank that are searched in a second: a rank that prints 100 MB/s must not delay the heartbeat."""
_MOST_WAITING = 1024


class Writer:
    """A thread that writes to files and terminals, so that a paused terminal or a file system that hangs does not block
    the agent.

    Data that is not written in time is dropped, the oldest first.
    """

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[int | Path, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._closing: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._files: dict[Path, int] = {}
        self._thread = Thread(self._run, name="weft-output")
        self._thread.start()

    def write(self, target: int | Path, data: bytes) -> None:
        """Queue ``data`` for a descriptor or the end of a file. Empty data closes the file."""
        while True:
            try:
                self._waiting.put_nowait((target, data))
                return
            except queue.Full:
                with suppress(queue.Empty):
                    dropped = self._waiting.get_nowait()
                    if dropped and not dropped[1] and isinstance(dropped[0], Path):
                        self._closing.put(dropped[0])

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until everything is written, for at most ``timeout_s``."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            target, data = item
            while not self._closing.empty():
                self._close(self._closing.get())
            with suppress(OSError):  # the terminal is closed, or the disk is full: training continues
                if not data and isinstance(target, Path):
                    self._close(target)
                descriptor = self._opened(target) if isinstance(target, Path) and data else target
                while data and isinstance(descriptor, int):
                    data = data[os.write(descriptor, data) :]

    def _opened(self, path: Path) -> int:
        if path not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files[path] = os.open(path, flags, 0o600)
        return self._files[path]

    def _close(self, path: Path) -> None:
        if path in self._files:
            os.close(self._files.pop(path))


@contextmanager
def stderr_on_thread() -> Iterator[None]:
    """Let a `Writer` perform all writes to `sys.stderr` in the block, such as prints and log messages."""
    writer = Writer()
    stream = io.TextIOWrapper(io.BufferedWriter(_Raw(writer, sys.stderr.fileno())), line_buffering=True)
    try:
        with redirect_stderr(stream):
            yield
    finally:
        stream.flush()
        writer.close()


class _Raw(io.RawIOBase):
    def __init__(self, writer: Writer, descriptor: int) -> None:
        self._writer, self._descriptor = writer, descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        copy = bytes(data)
        self._writer.write(self._descriptor, copy)
        return len(copy)


class Repeats:
    """Filter of messages that several processes of a host print, so that the terminal shows them once."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._first: dict[bytes, tuple[object, float]] = {}

    def without(self, data: bytes, process: object) -> bytes:
        """Return ``data`` without complete lines that another process printed a moment ago.

        Indented lines stay, because they belong to the line above. Redrawn lines (progress bars) stay, too.
        """
        now = self._clock()
        self._first = {line: seen for line, seen in self._first.items() if now - seen[1] <= REPEATED_S}
        return b"".join(line for line in data.splitlines(keepends=True) if not self._is_repeated(line, process, now))

    def _is_repeated(self, line: bytes, process: object, now: float) -> bool:
        if len(line) < _LEAST_OF_A_MESSAGE or not line.endswith(b"\n") or line[:1].isspace() or b"\r" in line:
            return False
        if len(self._first) >= _MOST_REMEMBERED and line not in self._first:  # for processes that print without end
            return False
        return self._first.setdefault(line, (process, now))[0] is not process


class Output:
    """The two streams of one process."""

    def __init__(
        self,
        path: Path,
        writer: Writer,
        on_lines: Callable[[list[str]], None] = lambda lines: None,
        repeats: Repeats | None = None,
    ) -> None:
        """Store output in ``path``, and call ``on_lines`` with complete lines.

        Args:
            repeats: the filter that the processes of a host share.
        """
        self._path, self._repeats = path, repeats or Repeats()
        self._writer = writer
        self._on_lines = on_lines
        self._looked_at = [0, 0]  # the current second, and the number of lines passed on in it
        self._reading: dict[int, int] = {}  # by descriptor to read: the descriptor of stdout or stderr to write to
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._unfinished = b""

    def open(self) -> tuple[int, int]:
        """Begin to read, and return the ends for the process to write to, which the caller closes."""
        ends = []
        for target in (sys.stdout, sys.stderr):
            reading, writing = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reading, False)
            self._reading[reading] = target.fileno()
            asyncio.get_running_loop().add_reader(reading, self._read, reading)
            ends.append(writing)
        return ends[0], ends[1]

    def go_on_in(self, path: Path) -> None:
        """Store later output in another file."""
        self._writer.write(self._path, b"")
        self._path = path
        self._lines.clear()

    def last_lines(self) -> list[str]:
        """Return the last lines printed, oldest first."""
        return [line.decode(errors="replace") for line in (*self._lines, self._unfinished) if line.strip()]

    def drain(self) -> None:
        """Read the output that the process had left when it ended, and close."""
        for descriptor in list(self._reading):
            for _ in range(_MOST_AT_THE_END // _PIECE):  # bounded, because another process may go on writing
                if not self._read(descriptor):
                    break
            self._close(descriptor)
        self._writer.write(self._path, b"")

    def _read(self, descriptor: int) -> bool:
        """Read a piece of output. Return False if there was none."""
        try:
            data = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._close(descriptor)
            return False
        if shown := self._repeats.without(data, self):
            self._writer.write(self._reading[descriptor], shown)
        self._writer.write(self._path, data)
        *whole, self._unfinished = (self._unfinished + data).replace(b"\r", b"\n").split(b"\n")
        self._unfinished = self._unfinished[-_MOST_OF_A_LINE:]
        lines = [line[-_MOST_OF_A_LINE:] for line in whole[-_MOST_LINES:] if line.strip()]
        self._lines.extend(lines)
        now = int(monotonic())
        if now != self._looked_at[0]:
            self._looked_at = [now, 0]
        lines = lines[: _MOST_LINES - self._looked_at[1]]
        self._looked_at[1] += len(lines)
        self._on_lines([line.decode(errors="replace") for line in lines])
        return True

    def _close(self, descriptor: int) -> None:
        if self._reading.pop(descriptor, None) is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


class Answer:
    """The standard output of one process. Standard error is discarded."""

    def __init__(self) -> None:
        self._said = bytearray()
        self._reading = -1

    @property
    def text(self) -> str:
        """Return the output so far."""
        return self._said.decode(errors="replace")

    def open(self) -> tuple[int, int]:
        """Begin to read, and return the ends for the process to write to, which the caller closes."""
        self._reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        return writing, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def drain(self) -> None:
        """Read the output that the process had left when it ended, and close."""
        while self._read():
            pass
        self._close()

    def _read(self) -> bool:
        """Read a piece of output. Return False if there was none."""
        if self._reading < 0:
            return False
        try:
            data = os.read(self._reading, _PIECE)
        except BlockingIOError:
            return False
        if not data or len(self._said) + len(data) > _MOST_OF_AN_ANSWER:
            self._close()
            return False
        self._said += data
        return True

    def _close(self) -> None:
        if self._reading >= 0:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1
