"""Lowering passes: each adds one kind of action to a compute-only schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from weft.pipeline.action import RECEIVES, SENDS, WEIGHT_USERS, Action, Op, Slot
from weft.pipeline.costs import CostModel
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule

_RECEIVES = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
_SENDS = {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}
"""The transfers into and out of a forward or an (input-gradient) backward."""


def lower(schedule: Schedule, *, zero_stage: int = 0) -> Schedule:
    """Add gradient reductions, optimiser steps, transfers, and ZeRO's weight all-gathers.

    Compute keeps its order. Lowering is idempotent: a pass skips actions that are already there.
    """
    # Transfers after reductions: an input gradient is sent before its stage's reduction starts.
    # Weight all-gathers last: they overlap with receiving the input.
    return add_unshard(add_transfers(add_optimizer_step(add_grad_reduction(schedule))), zero_stage=zero_stage)


def add_transfers(schedule: Schedule) -> Schedule:
    """Add a send right after each producer and a receive right before each consumer on another rank.

    A send posts the transfer and does not block; a receive waits for its arrival. The sends of a
    strand pair follow the pair, and the receives of both halves precede it.
    """
    if schedule.ops & (SENDS | RECEIVES):
        return schedule
    placement = schedule.placement
    crossed = crossings(placement)
    rows: list[list[Slot]] = []
    for row in schedule.rows:
        lowered: list[Slot] = []
        for slot in row:
            for op, stage, microbatch in slot:
                if op in _RECEIVES and (_RECEIVES[op], stage) in crossed:
                    lowered.append((Action(_RECEIVES[op], stage, microbatch),))
            lowered.append(slot)
            for op, stage, microbatch in slot:
                if op in _SENDS and (_SENDS[op], stage) in crossed:
                    lowered.append((Action(_SENDS[op], stage, microbatch),))
        rows.append(lowered)
    return schedule.with_rows(rows)


def crossings(placement: Placement) -> frozenset[tuple[Op, int]]:
    """Return the transfers that each micro-batch needs on ``placement``, as pairs of operation and sending stage."""
    ranks = placement.stage_ranks
    found: set[tuple[Op, int]] = set()
    for stage in range(placement.num_stages - 1):
        if not placement.is_last(stage) and ranks[stage] != ranks[stage + 1]:
            found |= {(Op.SEND_F, stage), (Op.RECV_F, stage + 1), (Op.SEND_B, stage + 1), (Op.RECV_B, stage)}
    return frozenset(found)


def add_grad_reduction(schedule: Schedule) -> Schedule:
    """Add ``REDUCE_GRAD`` for each virtual stage right after its last weight gradient."""
    if Op.REDUCE_GRAD in schedule.ops:
        return schedule
    rows: list[list[Slot]] = []
    for row in schedule.rows:
        last = {a.stage: index for index, slot in enumerate(row) for a in slot if a.op is Op.W or a.op is Op.B}
        lowered: list[Slot] = []
        for index, slot in enumerate(row):
            lowered.append(slot)
            ended = sorted({a.stage for a in slot if last.get(a.stage) == index})
            lowered += [(Action(Op.REDUCE_GRAD, stage),) for stage in ended]
        rows.append(lowered)
    return schedule.with_rows(rows)


def reduction_order(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the virtual stages of each row in the order in which it reduces their gradients."""
    return tuple(tuple(a.stage for slot in row for a in slot if a.op is Op.REDUCE_GRAD) for row in schedule.rows)


def reduce_in_order(schedule: Schedule, order: Sequence[Sequence[int]]) -> Schedule:
    """Return a lowered schedule that reduces gradients in a `reduction_order`, because replicas reduce them together.

    Where a row reduces a stage too early, the stage's last weight gradient is delayed. If it is part of a strand pair,
    the row remains as it is.
    """
    return schedule.with_rows([_in_order(row, stages) for row, stages in zip(schedule.rows, order, strict=True)])


def _in_order(row: Sequence[Slot], stages: Sequence[int]) -> list[Slot]:
    slots = list(row)
    for before, stage in pairwise(stages):
        earlier, reduction = ((Action(Op.REDUCE_GRAD, each),) for each in (before, stage))
        if slots.index(reduction) > slots.index(earlier):
            continue
        last = max(i for i, slot in enumerate(slots) for a in slot if a.stage == stage and a.op in (Op.B, Op.W))
        (op, _, microbatch), *other = slots[last]
        if other:
            return list(row)
        slots.remove(reduction)
        slots[last : last + 1] = [(Action(Op.I, stage, microbatch),)] if op is Op.B else []
        at = slots.index(earlier) + 1
        slots[at:at] = [(Action(Op.W, stage, microbatch),), reduction]
    return slots


def add_unshard(schedule: Schedule, *, zero_stage: int) -> Schedule:
    """Add ``UNSHARD`` and ``RESHARD``: the all-gather of weights that ZeRO shards, and their release.

    At ZeRO stages 1 and 2 the updated weights are gathered once per step: each row starts with an
    ``UNSHARD`` for every virtual stage, in order of use. At stage 3 an ``UNSHARD`` precedes each
    slot that uses the weights, and the receives of that slot, and a ``RESHARD`` follows it.
    Weight gradients need no weights.
    """
    if zero_stage == 0 or Op.UNSHARD in schedule.ops:
        return schedule
    if zero_stage < 3:
        held = schedule.placement.rank_stages
        return schedule.with_rows(
            [[*((Action(Op.UNSHARD, s),) for s in held[rank]), *row] for rank, row in enumerate(schedule.rows)]
        )
    rows: list[list[Slot]] = []
    for row in schedule.rows:
        lowered: list[Slot] = []
        received = 0  # receives of the next slot
        for slot in row:
            used = sorted({a.stage for a in slot if a.op in WEIGHT_USERS})
            at = len(lowered) - received
            lowered[at:at] = [(Action(Op.UNSHARD, stage),) for stage in used]
            lowered.append(slot)
            lowered += [(Action(Op.RESHARD, stage),) for stage in used]
            received = received + 1 if slot[0].op in RECEIVES else 0
        rows.append(lowered)
    return schedule.with_rows(rows)


def add_optimizer_step(schedule: Schedule) -> Schedule:
    """Add ``STEP`` at the end of each row, naming the rank's lowest virtual stage."""
    if Op.STEP in schedule.ops:
        return schedule
    held = schedule.placement.rank_stages
    return schedule.with_rows([[*row, (Action(Op.STEP, held[rank][0]),)] for rank, row in enumerate(schedule.rows)])


def split_backwards(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Split each ``B`` of these virtual stages into ``I`` and ``W``, except in strand pairs."""

    def parts(slot: Slot) -> list[Slot]:
        (op, stage, _), *other = slot
        if op is not Op.B or stage not in stages or other:
            return [slot]
        return [(slot[0]._replace(op=half),) for half in (Op.I, Op.W)]

    return schedule.with_rows([[part for slot in row for part in parts(slot)] for row in schedule.rows])


def open_pairs(schedule: Schedule, keep: Callable[[Action, Action], bool] = lambda *_: False) -> Schedule:
    """Replace each strand pair (a forward and a backward in one slot) by two slots, the backward first.

    This is faster for an engine that does not interleave kernels. Neither half's result waits for
    the other half, and the backward frees its activations before the forward saves its own.

    Args:
        keep: returns True for a forward and a backward that stay a pair; by default no pair stays.
    """

    def opened(slot: Slot) -> list[Slot]:
        return [slot] if len(slot) == 2 and keep(*slot) else [(action,) for action in reversed(slot)]

    return schedule.with_rows([[part for slot in row for part in opened(slot)] for row in schedule.rows])


def as_run(schedule: Schedule, costs: CostModel) -> Schedule:
    """Return the schedule as the engine runs it: only pairs whose segment plans gain time stay, others are split."""
    if costs.pairs is None:
        return open_pairs(schedule)
    return open_pairs(schedule, keep=lambda one, other: costs.pair_scale(one.stage, other.stage, other.op) < 1.0)
