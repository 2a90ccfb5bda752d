"""One run to a folder: a second one there is refused, and told who is first."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from weft.conf.private import make_run_folder

NAME = "lock"


class RunLock:
    """Holds a run's folder until this process ends, however it ends: the kernel lets go of it."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, which is made where it is missing.

        Raises:
            ValueError: another run has it; says which.
            OSError: the folder cannot be written.
        """
        make_run_folder(folder)
        path = folder / NAME
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Of this process alone: with flock, a child that outlives it would go on holding the folder.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            raise ValueError(
                f"{folder}: another run writes there ({holder or 'it has not said who it is'}); wait for it, end it, "
                "or choose another train.name or train.output_dir"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = file

    def release(self) -> None:
        """Let another run have the folder."""
        os.close(self._file)

    @classmethod
    def check(cls, folder: Path) -> None:
        """Find out whether the folder could be taken now; errors as of a lock."""
        if (folder / NAME).exists():
            cls(folder).release()
