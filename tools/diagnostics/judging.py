"""References for measured figures: the device's data sheet, or the best that this host has reached before."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.conf.host.diagnosis import CheckResult, Outcome
from weft.conf.host.measurements import Measurement, Measurements
from weft.tools.preflight import MIN_FREE_BYTES

TRIES = 3
"""Measurements before a figure counts as too low: another process may have disturbed it."""


@dataclass(frozen=True)
class Judge:
    """Compares measurements with references, and stores the best measurements of this host.

    Attributes:
        cache: best measurements by check and device.
    """

    cache: Measurements

    def by_data_sheet(
        self, check: str, measure: Callable[[], float], *, peak: float, share: float, unit: str
    ) -> CheckResult:
        """Pass if a measurement reaches ``share`` of the data sheet's figure."""
        figure, least = _best(measure, share * peak), share * peak
        says = f"{figure:.3g} {unit}, {figure / peak:.0%} of the data sheet's {peak:.3g}"
        return CheckResult(check, _outcome(figure >= least), says, figure, unit, least)

    def by_own_best(
        self, check: str, device: str, measure: Callable[[], float], *, share: float, unit: str
    ) -> CheckResult:
        """Pass if a measurement reaches ``share`` of this host's best so far; the first measurement always passes."""
        name = f"{check}, {device}"
        known = self.cache.read().get(name)
        best = float(known.value) if known and isinstance(known.value, (int, float)) and known.value > 0 else 0.0
        figure, least = _best(measure, share * best), share * best
        if not best:
            says = f"{figure:.3g} {unit}, the first figure of this host: later ones are held against it"
        else:
            says = f"{figure:.3g} {unit}, {figure / best:.0%} of the best here so far, {best:.3g}"
        if figure > best:
            try:
                self.cache.put({name: Measurement.now(figure)})
            except OSError as error:
                says += f"; not kept: {self.cache.path}: {error.strerror}"
        return CheckResult(check, _outcome(figure >= least), says, figure, unit, least if best else None)


def _best(measure: Callable[[], float], least: float) -> float:
    figure = -math.inf
    for _ in range(TRIES):
        figure = max(figure, measure())
        if figure >= least:
            break
    return figure


def _outcome(good: bool) -> Outcome:
    return Outcome.passed if good else Outcome.failed


OWN_SHARE = 0.1
"""Minimum share of the best speed of this folder: disks that others share vary."""
_PIECE = 4 << 20
_MOST_BYTES, _MOST_S = 128 << 20, 1.5


def check_disk(folder: Path, judge: Judge, piece_s: float = 0.0) -> CheckResult:
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
        return CheckResult("disk", Outcome.failed, f"{folder}: {error.strerror}{full}")
    finally:
        probe.unlink(missing_ok=True)


def check_free_space(folder: Path, least_bytes: int = MIN_FREE_BYTES) -> CheckResult:
    """Check that at least ``least_bytes`` of the disk are free for this user."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return CheckResult("free space", Outcome.failed, f"{folder}: {error.strerror}")
    outcome = Outcome.passed if free >= least_bytes else Outcome.failed
    return CheckResult(
        "free space", outcome, f"{free / 1e9:.1f} GB are free in {folder}", free / 1e9, "GB", least_bytes / 1e9
    )
