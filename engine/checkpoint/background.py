"""Writing in the background: training goes on while the disk works (MegaScale section 4.4)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from weft.engine.checkpoint.pieces import Piece

log = logging.getLogger(__name__)


def snapshot(pieces: Iterable[Piece]) -> list[Piece]:
    """Copies in host memory: the first of the two stages, after which training may go on."""
    return [replace(piece, data=piece.data.to("cpu", copy=True)) for piece in pieces]


class BackgroundWriter:
    """Runs one write at a time in a thread of its own.

    A write that is cut off by the end of the process is absent, like any other.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take the group over which ranks agree on a write; it has to be used by nothing else."""
        self.group = group
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: Exception | None = None

    @classmethod
    def open(cls) -> BackgroundWriter:
        """A writer for all ranks of the job; a collective call."""
        return cls(dist.new_group(backend="gloo"))

    def submit(self, write: Callable[[], Path]) -> None:
        """Start a write, when the one before it has ended.

        Raises:
            Exception: the write before this one failed; this one was not started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="weft-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait for the write that is under way; returns the last one's path, None if there was none.

        Raises:
            Exception: it failed; the next call starts afresh.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._path

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        except Exception as error:  # raised again by `wait`, on the trainer's thread
            log.error("%s", error)
            self._error = error
