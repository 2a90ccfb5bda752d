"""Background writes: training continues while a checkpoint is written (MegaScale section 4.4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from weft.comm.backends import in_host_memory
from weft.conf.host.threads import Thread
from weft.engine.checkpoint.pieces import Piece

log = logging.getLogger(__name__)


def snapshot(pieces: Iterable[Piece]) -> list[Piece]:
    """Copy pieces to host memory. Training may continue after that, while the copies are written."""
    return [replace(piece, data=piece.data.to("cpu", copy=True)) for piece in pieces]


class BackgroundWriter:
    """Runs one write at a time in a separate thread.

    If the process ends during a write, the write leaves no checkpoint.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Create a writer. During writes, ranks communicate over ``group``, which nothing else may use."""
        self.group = group
        self._thread: Thread | None = None
        self._path: Path | None = None
        self._error: Exception | None = None

    @classmethod
    def open(cls) -> BackgroundWriter:
        """Create a writer for all ranks of the job. Collective call."""
        return cls(dist.new_group(backend=in_host_memory(dist.get_backend())))

    def submit(self, write: Callable[[], Path]) -> None:
        """Wait until the previous write has ended, and start ``write``, which returns the checkpoint's path.

        Raises:
            Exception: the previous write failed. The new one was not started.
        """
        self.wait()
        self._thread = Thread(self._run, write, name="weft-checkpoint")
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait for a write in progress, and return the path of the last checkpoint, or None if there is none.

        Raises:
            Exception: the write failed. The error is raised only once.
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


class MemoryWriter(Protocol):
    """Takes checkpoints in host memory while training continues, more often than storage allows."""

    def before_step(self) -> None:
        """Wait until the state that the optimiser is about to change has been copied."""
        ...

    def take(self, client_state: Mapping[str, Any]) -> None:
        """Start a checkpoint of the step that has just ended. All ranks call this after the same step."""
        ...

    def finish(self) -> None:
        """Wait until the last checkpoint is complete on all hosts or has failed."""
        ...

    def recover(self, *, least_step: int = 0) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest complete checkpoint. Collective call.

        Returns:
            The checkpoint's step and ``client_state``, or None if there is no checkpoint.

        Args:
            least_step: checkpoints of earlier steps are ignored.
        """
        ...

    def forget(self) -> None:
        """Remove all checkpoints, because their steps are rolled back. Collective call."""
        ...

    def close(self) -> None:
        """Release the memory. Complete checkpoints stay."""
        ...

    def abandon(self) -> None:
        """Start no more copies, without collective calls."""
        ...
