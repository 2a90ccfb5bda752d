"""The files of steps of a run: the seconds of each section, read for a window of steps at a time.

Of files that are not shown only the footers are read, so that memory grows with ranks times shown steps, and not with
the length of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from weft.engine.observability.event_ring import KINDS

COLUMNS = ["step", "rank", "section", "count", "mean_s"]
INSIDE = "waits inside of computations"
"""A section that is summed from `WAITS`: those with a virtual stage."""
WAITS = ("gradients", "weights", "sums")
BATCH_ROWS = 1 << 17
"""Rows that are decoded at a time."""


class Seconds(NamedTuple):
    """Seconds of sections, summed over virtual stages; 0 where a section has no event.

    Attributes:
        ranks: the ranks of the run, in order.
        sections: names of the last axis of ``seconds``.
        seconds: of a window, by step, rank and section; of totals, by rank and section.
        is_recorded: by step and rank, True if there is any event.
        first: the first step.
    """

    ranks: np.ndarray
    sections: tuple[str, ...]
    seconds: np.ndarray
    is_recorded: np.ndarray
    first: int

    def of(self, section: str) -> np.ndarray:
        """Return the seconds of a section, NaN where nothing is recorded."""
        seconds = self.seconds[..., self.sections.index(section)]
        is_recorded = self.is_recorded if seconds.ndim == self.is_recorded.ndim else self.is_recorded.any(axis=0)
        return np.where(is_recorded, seconds, np.nan)


class _Part(NamedTuple):
    """A file's state on disk, and its first and last step and rank; of steps (0, 0) if it has none."""

    state: tuple[int, int]
    steps: tuple[int, int]
    ranks: tuple[int, int]

    def overlaps(self, other: _Part) -> bool:
        """True if both files may have the same step of the same rank."""
        pairs = (self.steps, other.steps), (self.ranks, other.ranks)
        return all(one[0] <= two[1] and two[0] <= one[1] for one, two in pairs)


class _Rows(NamedTuple):
    """Rows of a file, as arrays: indices of the step, the rank and the section, and seconds."""

    step: np.ndarray
    rank: np.ndarray
    section: np.ndarray
    seconds: np.ndarray

    def chosen(self, is_chosen: np.ndarray) -> _Rows:
        return _Rows(*(values[is_chosen] for values in self))


class StepFiles:
    """The files of steps in a folder, of all hosts.

    Args:
        ranks: the ranks of the run; others are left out.
    """

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self._folder, self._ranks = folder, np.array(sorted(ranks), dtype=np.int64)
        self._place_of = np.full(max(ranks, default=0) + 2, -1)  # the last entry is that of unknown ranks
        self._place_of[self._ranks] = np.arange(len(self._ranks))
        self._parts: dict[Path, _Part] = {}

    def refresh(self) -> bool:
        """Read the footers of new and changed files. Return True if there are any."""
        parts = {}
        for path in files_of(self._folder, "steps-*.parquet"):
            with suppress(OSError, ValueError):  # it is being replaced, or damaged
                found = path.stat()
                state = found.st_mtime_ns, found.st_size
                known = self._parts.get(path)
                parts[path] = known if known and known.state == state else _Part(state, *_contents(path))
        is_new, self._parts = parts != self._parts, parts
        return is_new

    @property
    def step_range(self) -> tuple[int, int]:
        """The first and the last recorded step, or (0, 0)."""
        known = [part.steps for part in self._parts.values() if part.steps[1]]
        return (min(first for first, _ in known), max(last for _, last in known)) if known else (0, 0)

    def window(self, first: int, last: int, sections: Sequence[str]) -> Seconds:
        """Return the seconds of these sections by step from ``first`` to ``last``, rank and section."""
        return self._summed(first, last, sections, by_step=True)

    def totals(self, first: int, last: int, sections: Sequence[str] = KINDS) -> Seconds:
        """Return the seconds of these sections by rank and section, summed over steps ``first`` to ``last``."""
        return self._summed(first, last, sections, by_step=False)

    def _summed(self, first: int, last: int, sections: Sequence[str], *, by_step: bool) -> Seconds:
        first = max(first, 1)  # step 0 is the set-up
        steps, ranks, names = max(0, last - first + 1), len(self._ranks), tuple(sections)
        summed = np.zeros((steps if by_step else 1, ranks, len(names)))
        is_recorded = np.zeros((steps, ranks), dtype=bool)
        is_ended = np.zeros((steps, ranks), dtype=bool)
        shown = [one for one in self._parts.items() if one[1].steps[0] <= last and one[1].steps[1] >= first]
        shown.sort(key=lambda one: file_number(one[0]), reverse=True)
        for path, part in shown:
            with suppress(OSError, ValueError):  # it is being replaced or removed
                ended = self._ends(path, first, steps) if self._is_shared(part, shown) else None
                repeated = None if ended is None else ended & is_ended
                for rows in self._rows(path, first, last, names):
                    if repeated is not None and repeated.any():
                        rows = rows.chosen(~repeated[rows.step, rows.rank])
                    is_recorded[rows.step, rows.rank] = True
                    places = (rows.step * ranks + rows.rank if by_step else rows.rank) * len(names) + rows.section
                    is_kept = rows.section >= 0
                    np.add.at(summed.reshape(-1), places[is_kept], rows.seconds[is_kept])
                if ended is not None:
                    is_ended |= ended
        pa.default_memory_pool().release_unused()
        return Seconds(self._ranks, names, summed if by_step else summed[0], is_recorded, first)

    @staticmethod
    def _is_shared(part: _Part, shown: list[tuple[Path, _Part]]) -> bool:
        """True if another file may have the same steps: a restarted run repeats steps, and the last one counts."""
        return any(other is not part and part.overlaps(other) for _, other in shown)

    def _ends(self, path: Path, first: int, steps: int) -> np.ndarray:
        """Return by step and rank whether a file has the step's end."""
        ended = np.zeros((steps, len(self._ranks)), dtype=bool)
        for rows in self._rows(path, first, first + steps - 1, ("step",)):
            is_end = rows.section == 0
            ended[rows.step[is_end], rows.rank[is_end]] = True
        return ended

    def _rows(self, path: Path, first: int, last: int, sections: tuple[str, ...]) -> Iterator[_Rows]:
        """Yield the rows of a file from step ``first`` to ``last``; the section is -1 if it is none of ``sections``."""
        numbers = {name: number for number, name in enumerate(sections)}
        with parquet.ParquetFile(path) as file:
            groups = [
                number
                for number, steps in enumerate(_ends_of(file, "step"))
                if steps is None or (steps[0] <= last and steps[1] >= first)
            ]
            has_stage = INSIDE in numbers and "stage" in file.schema_arrow.names
            columns = [*COLUMNS, "stage"] if has_stage else COLUMNS
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
                step, rank, coded, count, mean_s = map(batch.column, COLUMNS)
                coded = coded if isinstance(coded, pa.DictionaryArray) else coded.dictionary_encode()
                names = coded.dictionary.to_pylist()
                lookup = np.array([numbers.get(name, -1) for name in names] or [-1])
                at = step.to_numpy() - first
                place = self._place_of[rank.to_numpy().clip(-1, len(self._place_of) - 1)]
                found = _Rows(at, place, lookup[coded.indices.to_numpy()], count.to_numpy() * mean_s.to_numpy())
                is_shown = (at >= 0) & (at <= last - first) & (place >= 0)
                yield found if is_shown.all() else found.chosen(is_shown)
                if has_stage:
                    waits = [number for number, name in enumerate(names) if name in WAITS]
                    is_inside = is_shown & (batch.column("stage").to_numpy() >= 0)
                    is_inside &= np.isin(coded.indices.to_numpy(), waits)
                    section = np.full(len(at), numbers[INSIDE])
                    yield found._replace(section=section).chosen(is_inside)


def files_of(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match a pattern. Others, such as pipes, could block their reader."""
    return [path for path in folder.glob(pattern) if path.is_file()]


def file_number(path: Path) -> tuple[int, str]:
    """Return the number of a collector's file, and its name, which sort the files of a run by time."""
    _, _, number = path.stem.rpartition("-")
    return int(number) if number.isdecimal() else 0, path.name


def host_of(path: Path) -> str:
    """Return the host of a collector's file, which is named ``KIND-HOST-NUMBER.parquet``."""
    return path.stem.partition("-")[2].rpartition("-")[0]


def _ends_of(file: parquet.ParquetFile, column: str) -> list[tuple[int, int] | None]:
    """Return the least and the largest value of a column in each row group, or None without statistics."""
    found: list[tuple[int, int] | None] = []
    for number in range(file.num_row_groups):
        statistics = file.metadata.row_group(number).column(file.schema_arrow.get_field_index(column)).statistics
        has_both = statistics is not None and statistics.has_min_max
        found.append((statistics.min, statistics.max) if has_both else None)
    return found


def _contents(path: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first and the last step after the set-up, which is step 0, and those of the ranks; zeros without."""
    with parquet.ParquetFile(path) as file:
        steps: list[int] = []
        ranks: list[int] = []
        for number, ends in enumerate(zip(*(_ends_of(file, name) for name in ("step", "rank")), strict=True)):
            if None in ends or not ends[0][0]:
                read = file.read_row_group(number, columns=["step", "rank"]).to_pandas()
                read = read[read.step > 0]
                ends = tuple((int(each.min()), int(each.max())) for each in (read.step, read["rank"]) if len(each))
            steps += ends[0] if ends else ()
            ranks += ends[1] if ends else ()
        return (min(steps, default=0), max(steps, default=0)), (min(ranks, default=0), max(ranks, default=0))
