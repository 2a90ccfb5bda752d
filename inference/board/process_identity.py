"""Unique identity of a process: process ids alone are reused."""

from __future__ import annotations

import os


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not exist or has exited.

    Together with the process id this identifies a process uniquely.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])


def own_identity() -> tuple[int, int]:
    """This process's id and start time in ticks."""
    pid = os.getpid()
    ticks = start_ticks(pid)
    assert ticks is not None
    return pid, ticks
