"""Vital signs of a host in an agent's report: memory, disk, TCP retransmissions, and matched log lines."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
        """Start without matches."""
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
