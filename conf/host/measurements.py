"""Measurements of a machine that plans use: values in a file, each with its date, load and spread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from time import time
from typing import Any

from weft.conf.host.files import JsonCache

MOST_DAYS = 30.0
"""Age in days at which a value must be measured again."""
DOUBTFUL_DAYS = 1.0
"""Age in days at which a doubtful value must be measured again, even if the machine is busy."""
BUSY = 1.0
"""Number of processes ready to run per processor above which a measurement is doubtful."""
WIDE = 0.25
"""Spread above which a measurement is doubtful."""
CONTRADICTION = 0.25
"""Smallest relative difference by which a run contradicts a measured value."""
MEASURED = (
    "collectives.json",
    "overlap.json",
    "devices.json",
    "diagnostics.json",
    "prefill/*.json",
    "links/*.json",
)
"""Files of measurements in a cache folder."""
TRACED = ("work.json", "models.json")
"""Files with the traced work of models, which does not depend on the machine."""


@dataclass(frozen=True)
class Measurement:
    """A value, and how it was measured.

    Attributes:
        at: time of the measurement in seconds since 1970.
        load: number of processes ready to run per processor, over the minute before.
        spread: median relative difference of repeated measurements from the value, or None after a single one.
    """

    value: Any
    at: float
    load: float
    spread: float | None = None

    @classmethod
    def now(cls, value: Any, spread: float | None = None, *, load: float = 0.0) -> Measurement:
        """Return a measurement that was made now.

        Args:
            load: load of the measurement itself, in processes per processor. The host's load is used if it is higher.
        """
        return cls(value, time(), max(load, _load()), spread)

    @property
    def doubt(self) -> float:
        """Load or spread, whichever is larger, relative to the limit above which a measurement is doubtful."""
        return max(self.load / BUSY, (self.spread or 0.0) / WIDE)

    @property
    def is_old(self) -> bool:
        """True if plans should no longer use the value."""
        return time() - self.at > MOST_DAYS * 86_400

    @property
    def is_due(self) -> bool:
        """True if the value should be measured again.

        That is so if it is old. It is also so if it is doubtful, and the machine is at most half as busy now or
        `DOUBTFUL_DAYS` have passed.
        """
        doubtful = self.doubt > 1 and (_load() <= self.load / 2 or time() - self.at > DOUBTFUL_DAYS * 86_400)
        return doubtful or self.is_old

    def supersedes(self, known: Measurement | None) -> bool:
        """True if this measurement may replace another one.

        A doubtful one may not replace a better one, unless that is old.
        """
        return known is None or known.is_old or self.doubt <= max(1.0, known.doubt)

    def refutes(self, known: Measurement, faster: float) -> bool:
        """True if this measurement contradicts another one beyond their spreads.

        Other processes slow a measurement down. So a slower one counts only if its load is not doubtful, or not above
        the other's.

        Args:
            faster: ratio of this measurement's speed to the other's.
        """
        least = 1 + max(CONTRADICTION, known.spread or 0.0, self.spread or 0.0)
        return faster > least or (faster < 1 / least and self.load <= max(BUSY, known.load))

    def __str__(self) -> str:
        spread = "" if self.spread is None else f", spread {self.spread:.0%}"
        return f"{datetime.fromtimestamp(self.at):%Y-%m-%d %H:%M}, load {self.load:.1f} a processor{spread}"


@dataclass(frozen=True)
class Measurements:
    """Measurements by name, in a JSON file that several processes may write."""

    path: Path

    def read(self) -> dict[str, Measurement]:
        """Return all measurements, or none if the file is unreadable, see `JsonCache`.

        Malformed entries are left out.
        """
        found = {}
        for name, entry in JsonCache(self.path).read().items():
            try:
                found[name] = Measurement(entry["value"], float(entry["at"]), float(entry["load"]), entry["spread"])
            except (KeyError, TypeError, ValueError):
                continue
        return found

    def values(self) -> dict[str, Any]:
        """Return the values for plans: all that are not old."""
        return {name: found.value for name, found in self.read().items() if not found.is_old}

    def is_due(self, name: str) -> bool:
        """True if a value is missing, or should be measured again."""
        known = self.read().get(name)
        return known is None or known.is_due

    def store(self, values: Mapping[str, Any], spread: float | None = None) -> None:
        """Write values that were measured now, except those that `supersedes` excludes.

        Raises:
            OSError: the file cannot be written.
        """
        known, found = self.read(), {name: Measurement.now(value, spread) for name, value in values.items()}
        self.put({name: each for name, each in found.items() if each.supersedes(known.get(name))})

    def put(self, found: Mapping[str, Measurement]) -> None:
        """Write measurements. They replace earlier ones with the same names.

        Raises:
            OSError: the file cannot be written.
        """
        if found:
            JsonCache(self.path).add({name: asdict(each) for name, each in found.items()})


def spread_of(values: Sequence[float], value: float) -> float:
    """Return the median relative difference of ``values`` from ``value``."""
    return median(abs(each / value - 1) for each in values)


def files_in(folder: Path) -> list[Path]:
    """Return the existing files of `MEASURED` and `TRACED` in a cache folder."""
    return [path for pattern in (*MEASURED, *TRACED) for path in sorted(folder.glob(pattern))]


def _load() -> float:
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))
