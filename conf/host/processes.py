"""Processes of this host: state, timer slack, terminal, and a quick end of this process."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import sleep
from types import FrameType
from typing import NamedTuple, NoReturn, TextIO

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_TIME_WAIT = "06"
STOPPED = frozenset("Tt")
"""States of a process that a signal or a debugger has stopped."""
USUAL_S = 5e-5
"""Default timer slack of a process in Linux, in seconds."""
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_SESSION_TRIES = 20
"""How often to try to set a session's priority, which Linux accepts once in 0.1 s from all users together."""
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before a fork: the child should call, and nothing more
COLUMNS = "WEFT_COLUMNS"
"""Environment variable of ranks with the width of the terminal that displays their output."""
_USUAL_COLUMNS = 80


class ProcessState(NamedTuple):
    """State of a process, from /proc.

    Attributes:
        state: the kernel's letter. R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
        cpu_s: processor time of all its threads, in seconds.
        started: its start time, in clock ticks since boot.
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


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user of the process at the other end of a Unix socket, as the kernel reports them."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def connection_users(own: tuple[str, int], peer: tuple[str, int]) -> set[int]:
    """Return the users of this host whose TCP sockets may be the other end of a loopback connection.

    Args:
        own, peer: addresses of this end and of the other one. Only their ports are compared.
    """
    ends = [f"{port:04X}" for port in (peer[1], own[1])]
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, remote, state, *_ = fields = line.split()
                if [local[-4:], remote[-4:]] == ends and state != _TIME_WAIT:
                    found.add(int(fields[7]))
    return found


def host_identity() -> tuple[object, ...]:
    """Return a value that is equal for two processes that share memory and a network namespace."""
    network = os.stat("/proc/self/ns/net").st_ino
    return (Path("/proc/sys/kernel/random/boot_id").read_text(), os.getuid(), network)


def own_start() -> int:
    """Return the start time of this process, in clock ticks since boot."""
    state = process_state(os.getpid())
    assert state is not None
    return state.started


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter does, but without the destruction of modules.

    That takes seconds after many imports. `multiprocessing` ends the processes that it forks by the same two functions.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(code)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel send this signal to this process when its parent process ends."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def set_timer_slack(seconds: float) -> None:
    """Set the timer slack of this thread and of what it starts later. Linux may delay wake-ups by it.

    The least is 1 ns. Only timed waits change. A wait that an event ends is as prompt as before.
    """
    _LIBC.prctl(_PR_SET_TIMERSLACK, max(1, round(seconds * 1e9)))


def give_way(niceness: int) -> None:
    """Add ``niceness`` to this process's, and set its session's if this process leads one.

    Linux shares cores out by session first (`sched_autogroup_enabled`), so that beside other sessions a process's own
    niceness does not count.
    """
    os.nice(niceness)
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_SESSION_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness))
            return
        except BlockingIOError:
            sleep(0.1)
        except OSError:  # this kernel does not
            return


def allow_files() -> None:
    """Allow as many open files as this user may have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def columns_of(stream: TextIO) -> int:
    """Return the width of a terminal in columns.

    Return 0 if ``stream`` is not a terminal, or has no size, as under `ssh -tt` and `script`.
    """
    if not stream.isatty():
        return 0
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return _USUAL_COLUMNS
    return size.columns if size.lines > 0 else 0


def columns_behind(stream: TextIO, environment: Mapping[str, str]) -> int:
    """Return `columns_of` the stream. If that is 0, return the width in ``environment``, or 0."""
    text = environment.get(COLUMNS, "")
    return columns_of(stream) or (int(text) if text.isdecimal() else 0)


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot, or None if it does not exist or has exited.

    Together with the process id this identifies a process uniquely.
    """
    state = process_state(pid)
    return None if state is None or state.state in "ZX" else state.started


def own_identity() -> tuple[int, int]:
    """Return this process's id, and its start time in clock ticks since boot."""
    return os.getpid(), own_start()


_LOWEST, _HIGHEST = 10_000, 65_535
"""Ports below the lowest are used by well-known services."""
_TRIES = 100


def free_port() -> int:
    """Return a TCP port on which no process listens on this host.

    The kernel assigns its ephemeral ports to connections all the time, so one of them could be used before a process
    listens on it. Therefore this is one of the other ports, chosen at random.

    Raises:
        OSError: no free port was found.
    """
    ephemeral = _ephemeral()
    ours = [port for port in range(_LOWEST, _HIGHEST + 1) if port not in ephemeral]
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        port = chooser.choice(ours) if ours else 0
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError(f"no free port found in {_TRIES} tries; name one by cluster.master_port")


def _ephemeral() -> range:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # not Linux
        return range(32_768, _HIGHEST + 1)
    return range(int(low), int(high) + 1)


_freezes: bool | None = None
"""True if the program had frozen objects before the first step of any engine; None before that is known."""


def freeze_imports() -> None:
    """Keep all current objects out of later garbage collections, in this process and in its forks."""
    global _freezes
    gc.freeze()
    _freezes = True


def _program_freezes() -> bool:
    global _freezes
    if _freezes is None:
        _freezes = gc.get_freeze_count() > 0  # counting takes 60 ms after imports
    return _freezes


class LongLived:
    """Objects that outlive a step, which later collections need not examine.

    Without this, a collection occasionally takes a quarter of a second (MegaScale section 6.3).
    """

    def __init__(self) -> None:
        self._frozen = False

    def freeze(self) -> None:
        """Freeze all current objects. If the program has frozen objects itself, do nothing."""
        if not _program_freezes() and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Let collections examine all objects again."""
        if self._frozen:
            gc.unfreeze()


def open_standard_streams() -> None:
    """Open the null device for each of standard input, output and error that is closed.

    Otherwise the next file that this process or a child opens gets its number, and what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


TERMINATION = (signal.SIGTERM, signal.SIGHUP)


class Terminated(SystemExit):
    """The end of a command by a signal. The exit code is 128 plus the signal's number."""


def unwind_on_termination() -> None:
    """Raise `Terminated` in this process upon SIGTERM, or SIGHUP without `nohup`, so that context managers clean up."""
    for number in TERMINATION:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, partial(_unwind, os.getpid()))


def end_at_once_on_termination() -> None:
    """Undo `unwind_on_termination`."""
    for number in TERMINATION:
        if isinstance(signal.getsignal(number), partial):
            signal.signal(number, signal.SIG_DFL)


def _unwind(process: int, number: int, _frame: FrameType | None) -> None:
    if os.getpid() == process:
        raise Terminated(128 + number)
    signal.signal(number, signal.SIG_DFL)  # a fork, which has nothing to clear up
    os.kill(os.getpid(), number)
