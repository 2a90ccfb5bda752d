"""Unique identity of a process: process ids alone are reused."""

from __future__ import annotations

import os

from weft.conf.host.processes import own_start, process_state


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot, or None if it does not exist or has exited.

    Together with the process id this identifies a process uniquely.
    """
    state = process_state(pid)
    return None if state is None or state.state in "ZX" else state.started


def own_identity() -> tuple[int, int]:
    """This process's id and start time in ticks."""
    return os.getpid(), own_start()
