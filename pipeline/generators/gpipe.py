"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def generate_gpipe(placement: Placement, num_microbatches: int) -> Schedule:
    """Generate GPipe for any placement; a rank holds the activations of all micro-batches and all its stages.

    With several stages per rank the order is breadth-first: one stage after the other.
    """

    def row(stages: tuple[int, ...]) -> tuple[Slot, ...]:
        down = [(Action(Op.F, stage, m),) for stage in stages for m in range(num_microbatches)]
        up = [(Action(Op.B, stage, m),) for stage in reversed(stages) for m in range(num_microbatches)]
        return tuple(down + up)

    return Schedule("gpipe", placement, num_microbatches, tuple(map(row, placement.rank_stages)))
