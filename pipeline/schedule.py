"""The schedule: for each rank a row of slots, without times and without tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.dependencies import dependencies
from weft.pipeline.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one training step, in order.

    Attributes:
        name: the generator that made it, for people to read.
        placement: which rank holds which virtual stage.
        num_microbatches: micro-batches of one step and one replica.
        rows: one row per rank; a slot is one action or a strand pair.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Slot, ...], ...]

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The kinds of action that occur."""
        return frozenset(action.op for row in self.rows for slot in row for action in slot)

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return len(self.rows)

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of a rank in order, pairs opened."""
        for slot in self.rows[rank]:
            yield from slot

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """What ``action`` needs in this schedule: see `weft.pipeline.dependencies`."""
        return dependencies(action, self.placement, self.num_microbatches, self.ops)

    def with_rows(self, rows: list[list[Slot]]) -> Schedule:
        """The same schedule with other rows."""
        return replace(self, rows=tuple(map(tuple, rows)))
