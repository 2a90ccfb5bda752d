"""Measurements of a machine that plans use: values in a cache, with the date and load of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

from weft.conf.files import JsonCache

NOTES = "measured.json"
"""The file, alongside those of the values, that has a note on each."""
MOST_DAYS = 30.0
"""Age at which a value is measured anew."""
FILES = (
    "collectives.json",
    "overlap.json",
    "devices.json",
    "diagnostics.json",
    "prefill/*.json",
    "links/*.json",
    "work.json",
    "models.json",
)
"""Files that Weft keeps in a cache folder besides data and compiled code."""


@dataclass(frozen=True)
class Note:
    """How a value was measured.

    Attributes:
        at: seconds since 1970.
        load: processes ready to run for each processor, over the minute before.
        spread: largest less smallest measurement, as a share of the value; None if it was measured once.
    """

    at: float
    load: float
    spread: float | None = None

    @classmethod
    def now(cls, spread: float | None = None) -> Note:
        """Note the time and the load."""
        return cls(time(), os.getloadavg()[0] / len(os.sched_getaffinity(0)), spread)

    def __str__(self) -> str:
        spread = "" if self.spread is None else f", spread {self.spread:.0%}"
        return f"{datetime.fromtimestamp(self.at):%Y-%m-%d %H:%M}, load {self.load:.1f} a processor{spread}"


def keep(cache: JsonCache, entries: Mapping[str, Any], spread: float | None = None) -> None:
    """Put measured values into a cache in the place of earlier ones, each with a note.

    Raises:
        OSError: the cache cannot be written.
    """
    cache.add(entries)
    note = asdict(Note.now(spread))
    _notes(cache).add({_key(cache, name): note for name in entries})


def measured(cache: JsonCache) -> dict[str, Any]:
    """Return the values that are not too old; those without a note count as new."""
    notes = notes_of(cache)
    oldest = time() - MOST_DAYS * 86_400
    return {name: value for name, value in cache.read().items() if name not in notes or notes[name].at >= oldest}


def notes_of(cache: JsonCache) -> dict[str, Note]:
    """Return the notes on a cache's values."""
    found, prefix = {}, _key(cache, "")
    for key, note in _notes(cache).read().items():
        if key.startswith(prefix):
            try:
                found[key.removeprefix(prefix)] = Note(float(note["at"]), float(note["load"]), note["spread"])
            except (KeyError, TypeError, ValueError):
                continue
    return found


def files_in(folder: Path) -> list[JsonCache]:
    """Return the files of values in a cache folder."""
    return [JsonCache(path) for pattern in FILES for path in sorted(folder.glob(pattern))]


def remove(cache: JsonCache, names: set[str]) -> None:
    """Remove values and their notes; the file, if nothing is left."""
    left = {name: value for name, value in cache.read().items() if name not in names}
    if left:
        cache.replace(left)
    else:
        cache.path.unlink(missing_ok=True)
    notes, gone = _notes(cache), {_key(cache, name) for name in names}
    kept = {key: note for key, note in notes.read().items() if key not in gone}
    if kept:
        notes.replace(kept)
    else:
        notes.path.unlink(missing_ok=True)


def _notes(cache: JsonCache) -> JsonCache:
    return JsonCache(cache.path.with_name(NOTES))


def _key(cache: JsonCache, name: str) -> str:
    return f"{cache.path.name}: {name}"
