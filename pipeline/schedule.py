"""The schedule: a row of slots for each rank, without times or tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.dependencies import dependencies
from weft.pipeline.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """A training step: the actions of every rank, in order.

    Attributes:
        name: a label for people, usually the generator's name.
        placement: the rank of each virtual stage.
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
