"""The schedule: a row of slots for each rank, without times or tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from weft.pipeline.action import Action, Op, Slot, slot_text
from weft.pipeline.dependencies import dependencies
from weft.pipeline.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """A training step: the actions of every rank, in order.

    Attributes:
        name: a label for people, usually the generator's name.
        num_microbatches: micro-batches per step and replica.
        rows: one row per rank; a slot is one action or a strand pair.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Slot, ...], ...]

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The kinds of action that the schedule contains."""
        return frozenset(action.op for row in self.rows for slot in row for action in slot)

    @property
    def num_ranks(self) -> int:
        """Number of rows: all ranks of the placement."""
        return len(self.rows)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank in order; a pair yields its forward, then its backward."""
        for slot in self.rows[rank]:
            yield from slot

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Return the dependencies of ``action`` in this schedule: see `weft.pipeline.dependencies`."""
        return dependencies(action, self.placement, self.num_microbatches, self.ops)

    def with_rows(self, rows: list[list[Slot]]) -> Schedule:
        """Return the same schedule with its rows replaced."""
        return replace(self, rows=tuple(map(tuple, rows)))


_REACH = 4
"""Cells and ranks to show on each side of the failing cell."""


class ScheduleError(ValueError):
    """A schedule that cannot run; the message shows the failing cell and the rows around it.

    Attributes:
        reason: the message without the rows.
        rank: the rank of the failing cell.
        index: the position of the failing cell in that rank's row.
    """

    def __init__(
        self, reason: str, schedule: Schedule, rank: int, index: int, fronts: Mapping[int, int] | None = None
    ) -> None:
        """Describe a failure.

        Args:
            index: position in the row; the row's length stands for the end of the row.
            fronts: position that each other rank has reached; ``index`` for ranks left out.
        """
        self.reason = reason
        self.rank = rank
        self.index = index
        grid = excerpt(schedule, rank, index, fronts or {})
        super().__init__(f"schedule {schedule.name!r}: {reason}\n{grid}")


def excerpt(schedule: Schedule, rank: int, index: int, fronts: Mapping[int, int]) -> str:
    """Return the rows around a cell: ``<-- ERROR HERE`` marks the cell, ``*`` the positions of other ranks."""
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
