"""Stale resources of killed runs in a host's shared memory: their owners, and their removal."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from sys import stderr
from tempfile import gettempdir
from time import time

from weft.conf.host.private import shared_memory_folder
from weft.conf.host.processes import process_state
from weft.engine.supervision.progress_page import make_page, owner

PREFIX = "places-"
GONE_S = 5.0
"""Timeout for a killed agent to end, in seconds."""
OLD_S = 1800.0
"""Age in seconds from which resources without an owner are removed. Until then their run may start another agent."""


def page_path(run_folder: Path, host: str) -> Path:
    """Return the path of a host's progress page, in this user's shared memory. Related files have it as a prefix."""
    name = hashlib.sha256(f"{run_folder.absolute()} {host}".encode()).hexdigest()[:16]
    return shared_memory_folder(os.getuid()) / f"{PREFIX}{name}"


def take_page(page: Path, num_ranks: int) -> Path:
    """Create a host's page in shared memory or, if that has no space or does not exist, in the temporary folder.

    An earlier agent that still owns the page is killed with its ranks. It was stopped or unreachable, and its ranks use
    resources that their successors need, such as GPUs and ports.

    Raises:
        OSError, ValueError: the page can be created in neither folder.
    """
    with suppress(ValueError):
        _end(*owner(page))
    try:
        make_page(page, num_ranks)
        return page
    except (OSError, ValueError) as error:
        other = Path(gettempdir(), page.parent.name, page.name)
        make_page(other, num_ranks)
        print(f"weft: {page.parent}: {error}; what the agent shares with its ranks lies in {other.parent}", file=stderr)
        return other


def _end(pid: int, started: int) -> None:
    """Kill another agent and wait until it has ended. The start time must match, because pids are reused."""
    state = process_state(pid)
    if pid == os.getpid() or state is None or state.started != started:
        return
    with suppress(OSError):  # it has ended in the meantime
        if f"{__package__}.agent".encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return
        ended = os.pidfd_open(pid)
        os.kill(pid, SIGKILL)
        select.select([ended], [], [], GONE_S)
        os.close(ended)


class Ownership:
    """An agent's lock on its page. The kernel releases it when the agent ends."""

    def __init__(self, page: Path) -> None:
        """Lock an existing page, unless another agent of the same host still has the lock."""
        self._page = page
        self._file = os.open(page, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def renew(self) -> None:
        """Update the page's time of use. Call this regularly."""
        with suppress(OSError):
            os.utime(self._page)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


def remove_stale(folder: Path, own: str, *, now: float | None = None) -> list[str]:
    """Remove resources of runs whose agents were killed, if they have not been used for `OLD_S`.

    Args:
        folder: this user's folder in shared memory.
        own: name of the page to ignore.
        now: time of day in seconds since 1970, by default the current time.

    Returns:
        The names of the removed pages. Files whose names start with these are removed, too.
    """
    limit, gone = (time() if now is None else now) - OLD_S, []
    for name in sorted({path.name.partition(".")[0] for path in folder.glob(f"{PREFIX}*")} - {own}):
        parts = [path for path in folder.glob(f"{name}*") if path.name.partition(".")[0] == name]
        with suppress(OSError):
            if all(path.lstat().st_mtime < limit for path in parts) and not is_owned(folder / name):
                for path in parts:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                gone.append(name)
    return gone


def is_owned(page: Path) -> bool:
    """True if an agent owns a page.

    Raises:
        OSError: the page exists, and cannot be opened.
    """
    try:
        file = os.open(page, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
