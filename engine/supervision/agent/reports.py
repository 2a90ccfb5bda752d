"""An agent's reports: progress of ranks, the host's vital signs, and the times of reports."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic_ns
from typing import Any

from weft.conf.host.processes import STOPPED, ProcessState, process_state
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.agent.processes import Rank
from weft.engine.supervision.faults import OomKills, classify, read_report
from weft.engine.supervision.messages import GONE, RankEnd, RankReport
from weft.engine.supervision.progress_page import Reading

EARLY = 1
"""Exit code reported for a rank that exited with 0 in one of the phases `TRAINING`."""
TRAINING = frozenset({Phase.first_step, Phase.steady, Phase.evaluation, Phase.checkpoint})
PATTERNS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "Xid": r"NVRM: Xid|\bXid\b.*\b\d{2,3}\b",
        "ECC": r"(?i)uncorrectable ECC|\bECC error\b|double[- ]bit error",
        "device lost": r"(?i)fallen off the bus|GPU is lost|device.*(?:lost|not ready)",
        "CUDA error": r"CUDA (?:driver )?error|CUDA_ERROR_\w+|cudaError\w+|CUBLAS_STATUS_(?!SUC)\w+|device-side assert",
        "device memory": r"(?:CUDA|HIP) out of memory|OutOfMemoryError",
        "NCCL": r"NCCL (?:WARN|ERROR)|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|Watchdog caught coll",
        "InfiniBand": r"(?i)ibv_poll_cq|local ack timeout|transport retry counter exceeded|\bmlx5_\d+.*(?:error|down)",
        "host memory": r"(?i)\bout of memory: kill|oom-kill|Cannot allocate memory|std::bad_alloc|MemoryError",
        "numbers": r"(?i)(?:loss|norm|gradient)\b.{0,40}\b(?:nan|inf)\b|not finite|overflow! (?:skip|attempted)",
        "disk full": r"No space left on device|Disk quota exceeded|ENOSPC",
        "storage": r"(?i)Input/output error|Read-only file system|Stale file handle|blk_update_request",
        "network": r"(?i)connection (?:reset|timed out|refused)|Broken pipe|no route to host|network is unreachable",
        "crash": r"Segmentation fault|core dumped|Fatal Python error|terminate called|stack smashing",
    }.items()
}
"""Patterns of log lines, by the name under which they are reported. The first match counts."""
LONGEST_LINE = 400
"""Characters of a line that are searched and reported."""
MOST_MATCHES = 20
"""Most matched lines in one report. If there are more, the last ones are reported."""


def pattern_of(line: str) -> str | None:
    """Return the name of the pattern that a log line matches, or None."""
    line = line[:LONGEST_LINE]
    return next((name for name, pattern in PATTERNS.items() if pattern.search(line)), None)


class LogMatches:
    """Lines of ranks' logs that match a pattern and are not reported yet."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, str, str]] = deque(maxlen=MOST_MATCHES)

    def take(self, rank: int, lines: Iterable[str]) -> None:
        """Search lines that a rank has printed for patterns, and keep the matches."""
        for line in lines:
            if (name := pattern_of(line)) is not None:
                self._found.append((rank, name, line[:LONGEST_LINE].strip()))

    def drain(self) -> list[tuple[int, str, str]]:
        """Return the matches since the last call: rank, name of the pattern, line."""
        found = list(self._found)
        self._found.clear()
        return found


class Vitals:
    """The host's latest vital signs, read on a thread, because the file system of the run's folder may hang."""

    def __init__(self, run_folder: Path) -> None:
        self.matches = LogMatches()
        self._run_folder, self._thread = run_folder, threading.Thread()
        self._read: dict[str, Any] | None = None
        self._unreported: dict[str, Any] = {}

    def refresh(self) -> None:
        """Begin to read, unless an earlier read hangs."""
        self._merge()
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._refresh, name="weft-vitals", daemon=True)
            self._thread.start()

    def take(self) -> dict[str, Any]:
        """Return the latest vital signs, with each matched line only once."""
        self._merge()
        vitals, self._unreported = self._unreported, {**self._unreported, "patterns": []}
        return vitals

    def _refresh(self) -> None:
        self._read = host_vitals(self._run_folder, self.matches)

    def _merge(self) -> None:
        if self._read is not None:
            lines = [*self._unreported.get("patterns", []), *self._read["patterns"]]
            self._unreported, self._read = self._read | {"patterns": lines}, None


def host_vitals(run_folder: Path, matches: LogMatches) -> dict[str, Any]:
    """Return the vital signs of a host as JSON values, without unavailable ones.

    ``disk_free_bytes`` and ``disk_bytes`` describe the disk of the run's folder, ``memory_free_bytes`` and
    ``memory_bytes`` the host's memory. ``load`` is the load average, ``tcp_resent`` the number of TCP retransmissions
    since boot, and ``patterns`` the matched log lines.
    """
    return {**_disk(run_folder), **_memory(), **_network(), "load": os.getloadavg()[0], "patterns": matches.drain()}


def _disk(folder: Path) -> dict[str, int]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return {}
    return {"disk_free_bytes": found.f_bavail * found.f_frsize, "disk_bytes": found.f_blocks * found.f_frsize}


def _memory() -> dict[str, int]:
    names = {"MemAvailable": "memory_free_bytes", "MemTotal": "memory_bytes"}
    lines = (line.split() for line in _read("/proc/meminfo"))
    return {names[word]: int(value) * 1024 for name, value, *_ in lines if (word := name.rstrip(":")) in names}


def _network() -> dict[str, int]:
    tcp = [line.split() for line in _read("/proc/net/snmp") if line.startswith("Tcp:")]
    if len(tcp) != 2 or "RetransSegs" not in tcp[0]:
        return {}
    return {"tcp_resent": int(tcp[1][tcp[0].index("RetransSegs")])}


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


OFTEN = 4
"""Reports per heartbeat while a signal has stopped a rank. The driver needs two of them, a second apart."""


class ReportTimes:
    """The times of one agent's reports, by a monotonic clock in seconds."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._beat_at = self._told_at = -inf
        self._phases: Any = None

    def beats(self, now: float) -> bool:
        """True if the next heartbeat is due. The next interval begins with this call."""
        if now < self._beat_at + self._heartbeat_s:
            return False
        self._beat_at, self._told_at = now, -inf
        return True

    def tells(self, now: float, phases: Any, is_one_stopped: Callable[[], bool]) -> bool:
        """True if a report is due. Call this after `beats`.

        Args:
            phases: phases of the ranks. A change is reported immediately.
            is_one_stopped: whether a signal has stopped a rank.
        """
        due = self._told_at == -inf or phases != self._phases
        if not due and (now < self._told_at + self._heartbeat_s / OFTEN or not is_one_stopped()):
            return False
        self._told_at, self._phases = now, phases
        return True


@dataclass
class RankReports:
    """Reports of a host's ranks in one attempt, from their records on the page and their processes.

    Attributes:
        processes: the ranks by local rank. More may be appended.
        read: returns the record of a local rank on the host's progress page.
        errors: the error file of each local rank.
    """

    processes: Sequence[Rank] = ()
    read: Callable[[int], Reading | None] = lambda local: None
    errors: Sequence[Path] = ()

    def __post_init__(self) -> None:
        self._ends: dict[int, RankEnd] = {}
        self._oom_kills = OomKills(os.getpid())

    def reading(self, local: int) -> Reading | None:
        """Return a rank's progress in its attempt, or None if it has not reported yet."""
        rank, reading = self.processes[local], self.read(local)
        return reading if reading and (reading.attempt, reading.rank) == (rank.attempt, rank.rank) else None

    def phases(self) -> list[tuple[int, int] | None]:
        """Return attempt and phase of each record, or None for an empty one."""
        readings = map(self.read, range(len(self.processes)))
        return [reading and (reading.attempt, reading.phase) for reading in readings]

    def is_one_stopped(self) -> bool:
        """True if a signal has stopped a process."""
        return any(state is not None and state.state in STOPPED for state in map(_state, self.processes))

    def ranks(self) -> tuple[RankReport, ...]:
        """Return a report of each rank."""
        now_ns = monotonic_ns()
        return tuple(
            rank_report(rank.rank, rank.attempt, reading, _state(rank), now_ns=now_ns, exit_code=self._code(local))
            for local, rank in enumerate(self.processes)
            for reading in [self.read(local)]
        )

    def ends(self) -> dict[int, RankEnd]:
        """Return the failures by rank. Each is classified once."""
        for local, rank in enumerate(self.processes):
            code = self._code(local)
            if code and rank.rank not in self._ends:
                end = classify(code, read_report(self.errors[local]), oom_killed=self._oom_kills.seen())
                assert end is not None
                if rank.code == 0:
                    reading = self.read(local)
                    step = reading.progress.step if reading is not None else 0
                    end = replace(end, message=f"exit code 0 in step {step}, before training was done")
                self._ends[rank.rank] = end
        return dict(self._ends)

    def last_lines(self) -> dict[int, list[str]]:
        """Return the last lines of output of ranks that have failed."""
        return {rank.rank: rank.output.last_lines() for rank in self.processes if rank.rank in self._ends}

    def _code(self, local: int) -> int | None:
        """Return a rank's exit code, replaced by `EARLY` if it exited with 0 during training."""
        code = self.processes[local].code
        reading = self.reading(local) if code == 0 else None
        return EARLY if reading is not None and reading.phase in TRAINING else code


def _state(rank: Rank) -> ProcessState | None:
    return process_state(rank.pid) if rank.pid and rank.code is None else None


def rank_report(
    rank: int,
    attempt: int,
    reading: Reading | None,
    process: ProcessState | None,
    *,
    now_ns: int,
    exit_code: int | None = None,
) -> RankReport:
    """Return the report of a rank.

    Args:
        attempt: the attempt that the agent has assigned the rank to.
        reading: the rank's record on the page. A record of an earlier attempt is ignored.
        process: state of the rank's process, or None if it has ended.
        now_ns: `time.monotonic_ns` of this host.
        exit_code: exit code of the rank, or None while it lives.
    """
    report = RankReport(rank, attempt, state=GONE, exit_code=exit_code)
    if process is not None:
        report = report._replace(
            state=process.state, cpu_s=round(process.cpu_s, 2), resident_bytes=process.resident_bytes
        )
    if reading is None or reading.attempt != attempt or reading.rank != rank:
        return report
    return report._replace(
        phase=reading.phase,
        progress=reading.progress,
        num_microbatches=reading.num_microbatches,
        still_s=round(max(0, now_ns - reading.moved_ns) / 1e9, 3),
        tick=reading.tick,
        busy_s=round(reading.busy_ns / 1e9, 6),
        measured_steps=reading.measured_steps,
        device_bytes=reading.device_bytes,
        kept_step=reading.kept_step,
        links=reading.links,
    )
