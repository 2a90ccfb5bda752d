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

from weft.conf.private import shared_memory_folder
from weft.conf.processes import process_state
from weft.engine.supervision.places import make_page, owner

PREFIX = "places-"
GONE_S = 5.0
"""Seconds in which a killed agent is waited for."""
OLD_S = 1800.0
"""Seconds after which what nobody owns is removed: a run whose agent has ended may start another until then."""


def page_path(run_folder: Path, host: str) -> Path:
    """Where the places of a host's ranks lie, in shared memory of this user alone; what goes with them begins so."""
    name = hashlib.sha256(f"{run_folder.absolute()} {host}".encode()).hexdigest()[:16]
    return shared_memory_folder(os.getuid()) / f"{PREFIX}{name}"


def take_page(page: Path, num_ranks: int) -> Path:
    """Make a host's page, in shared memory or, where that has no space or is not to be had, in the temporary folder.

    An agent that had the page ends with its ranks: it is stopped, or the way to it was cut, and its ranks hold what
    others are about to need.

    Raises:
        OSError, ValueError: there is no space in either.
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
    """Kill another agent, if it is the process that began then, and wait until it has gone."""
    state = process_state(pid)
    if pid == os.getpid() or state is None or state.started != started:
        return
    with suppress(OSError):  # it has ended since
        if f"{__package__}.agent".encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return
        ended = os.pidfd_open(pid)
        os.kill(pid, SIGKILL)
        select.select([ended], [], [], GONE_S)
        os.close(ended)


class Ownership:
    """An agent's hold on its page; the kernel lets go however the agent ends."""

    def __init__(self, page: Path) -> None:
        """Take a page that is there; another agent of the same host may have it still."""
        self._page = page
        self._file = os.open(page, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def renew(self) -> None:
        """Say that the page is in use; to be called now and then."""
        with suppress(OSError):
            os.utime(self._page)

    def release(self) -> None:
        """Let go."""
        os.close(self._file)


def remove_leftovers(folder: Path, own: str, *, now: float | None = None) -> list[str]:
    """Remove what runs have left whose agents were killed, and that nobody has used for `OLD_S`.

    Args:
        folder: of this user, in shared memory.
        own: name of the page that is not looked at.
        now: time of day.

    Returns:
        The names of the pages that went, with all that begins as they do.
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
    """True if an agent holds a page.

    Raises:
        OSError: it cannot be opened, for another reason than that it is missing.
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
