"""The disk of a folder: free space, and write speed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

from weft.conf.host.diagnosis import Finding, Verdict
from weft.tools.diagnostics.judging import Judge
from weft.tools.preflight import MIN_FREE_BYTES

OWN_SHARE = 0.1
"""Minimum share of the best speed of this folder: disks that others share vary."""
_PIECE = 4 << 20
_MOST_BYTES, _MOST_S = 128 << 20, 1.5


def check_disk(folder: Path, judge: Judge, piece_s: float = 0.0) -> Finding:
    """Measure the write speed to the disk of ``folder`` in megabytes per second.

    Args:
        piece_s: for tests: additional seconds per 4 MiB.
    """
    probe = folder / f".weft-doctor-{os.getpid()}"

    def measure() -> float:
        piece, written, begun = os.urandom(_PIECE), 0, time.perf_counter()
        with open(probe, "xb", buffering=0) as out:
            while written < _MOST_BYTES and time.perf_counter() - begun < _MOST_S:
                written += out.write(piece)
                os.fdatasync(out.fileno())
                time.sleep(piece_s)
        took = time.perf_counter() - begun
        probe.unlink()
        return written / took / 1e6

    try:
        return judge.by_own_best("disk", f"folder {folder.absolute()}", measure, share=OWN_SHARE, unit="MB/s")
    except OSError as error:
        full = " (free some space)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return Finding("disk", Verdict.failed, f"{folder}: {error.strerror}{full}")
    finally:
        probe.unlink(missing_ok=True)


def check_free_space(folder: Path, least_bytes: int = MIN_FREE_BYTES) -> Finding:
    """Check that at least ``least_bytes`` of the disk are free for this user."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("free space", Verdict.failed, f"{folder}: {error.strerror}")
    verdict = Verdict.passed if free >= least_bytes else Verdict.failed
    return Finding(
        "free space", verdict, f"{free / 1e9:.1f} GB are free in {folder}", free / 1e9, "GB", least_bytes / 1e9
    )
