"""The schedule error: what is wrong, and the rows around the cell where it is."""

from __future__ import annotations

from collections.abc import Mapping

from weft.pipeline.action import slot_text
from weft.pipeline.schedule import Schedule

_REACH = 4
"""Cells and ranks shown on either side of the failing cell."""


class ScheduleError(ValueError):
    """A schedule that cannot be run as asked; the message prints the failing cell in its rows.

    Attributes:
        reason: the message without the rows.
        rank: the failing cell's rank.
        index: the failing cell's place in that rank's row.
    """

    def __init__(
        self, reason: str, schedule: Schedule, rank: int, index: int, fronts: Mapping[int, int] | None = None
    ) -> None:
        """Describe a failure.

        Args:
            index: where in the row; its length stands for the end of the row.
            fronts: where each other rank stands at that moment; ``index`` for those left out.
        """
        self.reason = reason
        self.rank = rank
        self.index = index
        grid = excerpt(schedule, rank, index, fronts or {})
        super().__init__(f"schedule {schedule.name!r}: {reason}\n{grid}")


def excerpt(schedule: Schedule, rank: int, index: int, fronts: Mapping[int, int]) -> str:
    """The rows around a cell, with the cell marked ``<-- ERROR HERE`` and other fronts by ``*``."""
    near = range(max(0, rank - _REACH), min(schedule.num_ranks, rank + _REACH + 1))
    lines = []
    for other in sorted({*near, *fronts}):
        row = schedule.rows[other]
        middle = index if other == rank else fronts.get(other, index)
        first, last = max(0, middle - _REACH), min(len(row), middle + _REACH + 1)
        cells = ["..."] if first > 0 else []
        for place in range(first, last):
            text = slot_text(row[place])
            if (other, place) == (rank, index):
                text += " <-- ERROR HERE"
            elif fronts.get(other) == place:
                text = f"*{text}"
            cells.append(text)
        if other == rank and index >= len(row):
            cells.append("(end) <-- ERROR HERE")
        elif last < len(row):
            cells.append("...")
        lines.append(f"  rank {other:<3} " + "  ".join(cells))
    return "\n".join(lines)
