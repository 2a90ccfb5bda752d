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
"""Age at which a value is measured anew."""
DOUBTFUL_DAYS = 1.0
"""Age at which a doubtful value is measured anew, however busy the machine is."""
BUSY = 1.0
"""Processes ready to run for each processor; a measurement under more is doubtful."""
WIDE = 0.25
"""Spread beyond which a measurement is doubtful."""
CONTRADICTION = 0.25
"""Minimum share by which a run differs from a value that it contradicts."""
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
"""Files of what models were traced to do, which no machine changes."""


@dataclass(frozen=True)
class Measurement:
    """A value, and how it was measured.

    Attributes:
        value: anything that JSON has.
        at: seconds since 1970.
        load: processes ready to run for each processor, over the minute before.
        spread: median share of the value by which repeated measurements differ from it; None if it was measured once.
    """

    value: Any
    at: float
    load: float
    spread: float | None = None

    @classmethod
    def now(cls, value: Any, spread: float | None = None, *, load: float = 0.0) -> Measurement:
        """Return a measurement that was taken now.

        Args:
            load: processes per processor of the measurement itself; the host's load counts if it is higher.
        """
        return cls(value, time(), max(load, _load()), spread)

    @property
    def doubt(self) -> float:
        """Load or spread as a multiple of what makes a measurement doubtful."""
        return max(self.load / BUSY, (self.spread or 0.0) / WIDE)

    @property
    def is_old(self) -> bool:
        """True if plans should no longer use it."""
        return time() - self.at > MOST_DAYS * 86_400

    @property
    def is_due(self) -> bool:
        """True if it should be measured anew: it is old, or doubtful and the machine is half as busy now."""
        doubtful = self.doubt > 1 and (_load() <= self.load / 2 or time() - self.at > DOUBTFUL_DAYS * 86_400)
        return doubtful or self.is_old

    def supersedes(self, known: Measurement | None) -> bool:
        """True if it may take the place of another one: a doubtful one never takes that of a better one."""
        return known is None or known.is_old or self.doubt <= max(1.0, known.doubt)

    def refutes(self, known: Measurement, faster: float) -> bool:
        """True if it contradicts another one beyond their spreads.

        Other work slows a measurement down, so that a slower one counts only if it is not doubtful, or
        not more so than the other.

        Args:
            faster: ratio of the speeds of this one and of the other.
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
        """Return all measurements; none where the file is unreadable, see `JsonCache`."""
        found = {}
        for name, entry in JsonCache(self.path).read().items():
            try:
                found[name] = Measurement(entry["value"], float(entry["at"]), float(entry["load"]), entry["spread"])
            except (KeyError, TypeError, ValueError):
                continue
        return found

    def values(self) -> dict[str, Any]:
        """Return the values to plan with: those that are not old."""
        return {name: found.value for name, found in self.read().items() if not found.is_old}

    def is_due(self, name: str) -> bool:
        """True if a value is missing, or should be measured anew."""
        known = self.read().get(name)
        return known is None or known.is_due

    def keep(self, values: Mapping[str, Any], spread: float | None = None) -> None:
        """Write values that were measured now, but none in the place of a better one.

        Raises:
            OSError: the file cannot be written.
        """
        known, found = self.read(), {name: Measurement.now(value, spread) for name, value in values.items()}
        self.put({name: each for name, each in found.items() if each.supersedes(known.get(name))})

    def put(self, found: Mapping[str, Measurement]) -> None:
        """Write measurements in the place of earlier ones.

        Raises:
            OSError: the file cannot be written.
        """
        if found:
            JsonCache(self.path).add({name: asdict(each) for name, each in found.items()})


def spread_of(values: Sequence[float], value: float) -> float:
    """Return the median share of ``value`` by which ``values`` differ from it."""
    return median(abs(each / value - 1) for each in values)


def files_in(folder: Path) -> list[Path]:
    """Return the files of `MEASURED` and `TRACED` in a cache folder."""
    return [path for pattern in (*MEASURED, *TRACED) for path in sorted(folder.glob(pattern))]


def _load() -> float:
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))
