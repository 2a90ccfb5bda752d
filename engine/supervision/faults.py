"""Classes of faults by which a rank ends, the response to each, and the error file that a rank writes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from weft.engine.supervision.messages import ErrorReport, FaultKind, RankEnd, decode

LONGEST_FILE = 64 * 1024
"""Largest size of a valid error file, in bytes."""
LONGEST_MESSAGE = 4000
"""Characters of a message that are stored."""


@dataclass(frozen=True)
class Policy:
    """The policy for a class of faults.

    Attributes:
        most: number of attempts with this fault at the same step after which the run ends.
        is_final: True if the run ends at once, because another attempt would end in the same way.
    """

    most: int = 3
    is_final: bool = False


POLICIES: Mapping[FaultKind, Policy] = {
    FaultKind.input_error: Policy(1, is_final=True),
    # Before this fault, the run has already skipped steps, gone back and omitted batches.
    FaultKind.bad_numbers: Policy(1, is_final=True),
    FaultKind.corruption: Policy(),
    # Another process may have used the memory. A step needs nearly the same amount each time.
    FaultKind.host_memory: Policy(2),
    FaultKind.device_memory: Policy(2),
    FaultKind.disk_full: Policy(),
    FaultKind.checkpoint: Policy(2),
    FaultKind.lost_peer: Policy(),
    FaultKind.signal: Policy(),
    FaultKind.stopped: Policy(),
    FaultKind.other: Policy(),
}
"""The policy for each class."""
STOPPED_CODES = frozenset(128 + number for number in (signal.SIGTERM, signal.SIGINT))
"""Exit codes of ranks that stopped because of a signal."""
_LESS_TELLING = (FaultKind.signal, FaultKind.other, FaultKind.stopped, FaultKind.lost_peer)
"""Classes that may follow from another rank's fault, the most specific first."""


def read_report(path: Path) -> ErrorReport | None:
    """Return a rank's error report, or None if there is no valid one."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            report = decode(file.read(LONGEST_FILE), ErrorReport)
        return replace(report, message=report.message[:LONGEST_MESSAGE])
    except (OSError, ValueError, RecursionError):
        return None


def classify(status: int, report: ErrorReport | None, *, oom_killed: bool = False) -> RankEnd | None:
    """Return how a rank ended, or None if it succeeded.

    Args:
        status: the rank's exit code, or minus the number of the signal that killed it.
        report: the rank's error report, as `read_report` returns it.
        oom_killed: whether the kernel's OOM killer has acted in the rank's control group (`OomKills`).
    """
    if status == 0:
        return None
    if status == -signal.SIGKILL and oom_killed:
        message = "killed by the kernel: its control group was out of memory"
        step, data = (None, None) if report is None else (report.step, report.data)
        return RankEnd(kind=FaultKind.host_memory, message=message, step=step, data=data, status=status)
    if report is not None:
        return RankEnd(status=status, **vars(report))
    if status < 0:
        return RankEnd(kind=FaultKind.signal, message=f"killed by {_signal_name(-status)}", status=status)
    if status in STOPPED_CODES:
        return RankEnd(kind=FaultKind.stopped, message=f"asked to stop by {_signal_name(status - 128)}", status=status)
    kind = FaultKind.input_error if status == 2 else FaultKind.other
    return RankEnd(kind=kind, message=f"exit code {status}, and no word of why", status=status)


def cause(ends: Mapping[int, RankEnd]) -> int:
    """Return the rank whose end probably caused the others: the lowest rank of the most specific class of faults.

    ``ends`` must not be empty.
    """

    def order(rank: int) -> tuple[int, int]:
        kind = ends[rank].kind
        return (_LESS_TELLING.index(kind) + 1 if kind in _LESS_TELLING else 0), rank

    return min(ends, key=order)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class OomKills:
    """Counts the kernel's OOM kills in a process's control group, of cgroup v2 or v1."""

    def __init__(self, pid: int, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        """Find the control group of a live process, and count OOM kills from now on.

        Args:
            proc, cgroups: mount points of these file systems.
        """
        self._files = _event_files(pid, proc, cgroups)
        self._before = self._count()

    def seen(self) -> bool:
        """Return True if there was an OOM kill since the last call, or since the start."""
        before, self._before = self._before, self._count()
        return self._before > before

    def _count(self) -> int:
        return sum(_oom_kills(path) for path in self._files)


def _event_files(pid: int, proc: Path, cgroups: Path) -> list[Path]:
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        hierarchy, controllers, place = line.split(":", 2)
        inside = place.lstrip("/")
        if hierarchy == "0":
            files += [cgroups / inside / "memory.events", cgroups / "unified" / inside / "memory.events"]
        elif "memory" in controllers.split(","):
            files.append(cgroups / "memory" / inside / "memory.oom_control")
    return files


def _oom_kills(path: Path) -> int:
    try:
        words = path.read_text().split()
    except OSError:  # there is no such group, or the kernel does not count
        return 0
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return int(counts.get("oom_kill", 0))
