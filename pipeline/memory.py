"""Activation memory: saved bytes and live chunk activations along a rank's row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from weft.pipeline.action import COMPUTE, Op, Slot
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.schedule import Schedule


class Held(NamedTuple):
    """The peak memory of a rank while one slot runs."""

    num_bytes: float
    num_chunks: int
    """Live chunk activations: forwards whose input gradient has not been computed yet."""


def peak_bytes(schedule: Schedule, costs: CostModel) -> float:
    """Return the peak bytes of saved activations on any rank."""
    return max((held.num_bytes for row in schedule.rows for held in held_along(row, costs)), default=0.0)


def held_along(row: Iterable[Slot], costs: CostModel) -> Iterator[Held]:
    """Yield the peak memory of a rank during each slot of its row.

    A strand pair with a segment plan and a full backward saves and frees layer by layer. Any other slot
    saves when it starts and frees when it has finished; in a pair, both halves do so together.
    """
    saved = {(op, stage): saved_bytes(cost, op) for stage, cost in enumerate(costs.stages) for op in COMPUTE}
    freed = {(op, stage): freed_bytes(cost, op) for stage, cost in enumerate(costs.stages) for op in COMPUTE}
    num_bytes, num_chunks = 0.0, 0
    for slot in row:
        if slot[0].op not in COMPUTE:
            yield Held(num_bytes, num_chunks)
            continue
        before = num_bytes
        for op, stage, _ in slot:
            num_bytes += saved[op, stage]
            num_chunks += op is Op.F
        yield Held(before + _paired_bytes(slot, costs) if _is_planned(slot, costs) else num_bytes, num_chunks)
        for op, stage, _ in slot:
            num_bytes -= freed[op, stage]
            num_chunks -= op is Op.B or op is Op.I


def _is_planned(slot: Slot, costs: CostModel) -> bool:
    return costs.pairs is not None and len(slot) == 2 and slot[1].op is Op.B


def _paired_bytes(slot: Slot, costs: CostModel) -> float:
    """Return the peak bytes that a pair adds to those saved before it."""
    (_, forward, _), (_, backward, _) = slot
    assert costs.pairs is not None
    saved, freed = (costs.stages[stage].activation_bytes for stage in (forward, backward))
    return costs.pairs.held(forward, backward, saved, freed)


def saved_bytes(cost: StageCost, op: Op) -> float:
    """Return the bytes that ``op`` saves when it starts: activations, or the inputs of the weight gradient."""
    if op is Op.F:
        return cost.activation_bytes
    return cost.weight_saved_bytes if op is Op.I else 0.0


def freed_bytes(cost: StageCost, op: Op) -> float:
    """Return the bytes that ``op`` frees when it ends, which the forward or the input gradient saved."""
    if op is Op.I or op is Op.B:
        return cost.activation_bytes
    return cost.weight_saved_bytes if op is Op.W else 0.0
