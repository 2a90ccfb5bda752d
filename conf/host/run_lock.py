"""The run lock: only one run may write to a folder. A second run gets an error that names the first."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from weft.conf.host.private import make_run_folder

NAME = "lock"


class RunLock:
    """Lock of a run's folder until this process ends. The kernel releases it, however the process ends."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder, and create it if it is missing.

        Raises:
            ValueError: another run has the lock. The message names it.
            OSError: the folder cannot be written.
        """
        make_run_folder(folder)
        path = folder / NAME
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Per process: with flock, a child that outlives this process would keep the lock.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            raise ValueError(
                f"{folder}: another run writes there ({holder or 'unknown process'}); wait for it, end it, "
                "or choose another train.name or train.output_dir"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = file

    def release(self) -> None:
        """Release the folder for another run."""
        os.close(self._file)

    @staticmethod
    def holder(folder: Path) -> int | None:
        """Return the id of the process that locked the folder last. It may have ended since.

        Return None if that process ran on another host, or the folder was never locked.
        """
        try:
            words = (folder / NAME).read_text(errors="replace")[:200].split()
        except OSError:
            return None
        known = len(words) == 4 and words[1].isdecimal() and words[3] == socket.gethostname()
        return int(words[1]) if known else None

    @classmethod
    def check(cls, folder: Path) -> None:
        """Check that the folder could be locked now. Raise ValueError if another run has the lock."""
        if (folder / NAME).exists():
            cls(folder).release()
