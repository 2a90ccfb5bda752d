"""Processes: their state as reported by the kernel, and a quick end of this one."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NamedTuple, NoReturn

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

STOPPED = frozenset("Tt")
"""States of a process that a signal or a debugger has stopped."""


class ProcessState(NamedTuple):
    """A process, as /proc has it.

    Attributes:
        state: the kernel's letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
        cpu_s: processor time of all its threads, in seconds.
        started: when it began, in clock ticks since boot.
        resident_bytes: memory that it holds.
    """

    state: str
    cpu_s: float
    started: int
    resident_bytes: int


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, or None if there is no process with this id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    cpu_s = (int(fields[10]) + int(fields[11])) / _TICKS_PER_S
    return ProcessState(state.decode(), cpu_s, int(fields[18]), int(fields[20]) * _PAGE_BYTES)


def own_start() -> int:
    """Return the start time of this process, in clock ticks since boot."""
    state = process_state(os.getpid())
    assert state is not None
    return state.started


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter does, without taking modules apart, which takes seconds after many imports.

    `multiprocessing` ends the processes that it forks by the same two functions.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(code)
