"""The validator: checks that a schedule is complete, free of deadlocks and within its memory cap."""

from __future__ import annotations

from collections.abc import Iterator, Set

from weft.pipeline.action import BACKWARD, RECEIVES, RELAYS, SENDS, WEIGHT_USERS, Action, Op
from weft.pipeline.costs import CostModel
from weft.pipeline.lowering import crossings
from weft.pipeline.memory import held_along
from weft.pipeline.order import execution_order
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule, ScheduleError


def validate(schedule: Schedule, *, costs: CostModel | None = None, memory_cap_bytes: float | None = None) -> None:
    """Check that ``schedule`` can run to its end.

    Every virtual stage needs one F, and either B or I and W, per micro-batch; other kinds of
    action must be present everywhere or nowhere. Actions must be on the rank of their stage, pairs
    must be valid, no rank may deadlock, and no rank may exceed the memory cap.

    Args:
        costs: bytes of each virtual stage; required with ``memory_cap_bytes``.
        memory_cap_bytes: limit on the activation memory of any rank; None means no cap.

    Raises:
        ScheduleError: a check fails; the message marks the failing cell and names its missing inputs.
        ValueError: ``memory_cap_bytes`` is given without ``costs``.
    """
    _check_cells(schedule)
    _check_whole(schedule)
    _check_sharded(schedule)
    _check_offloaded(schedule)
    for _ in execution_order(schedule):
        pass
    if memory_cap_bytes is not None:
        if costs is None:
            raise ValueError(f"memory_cap_bytes={memory_cap_bytes:g}: it needs costs, which hold the bytes of a stage")
        check_memory(schedule, costs, memory_cap_bytes)


def check_memory(schedule: Schedule, costs: CostModel, memory_cap_bytes: float) -> None:
    """Check that no rank's activation memory ever exceeds ``memory_cap_bytes``.

    Raises:
        ScheduleError: one does; the message marks the first cell that exceeds the cap.
    """
    for rank, row in enumerate(schedule.rows):
        for index, held in enumerate(held_along(row, costs)):
            if held.num_bytes > memory_cap_bytes * (1 + 1e-9):
                reason = (
                    f"rank {rank} would hold {held.num_bytes:g} bytes of activations ({held.num_chunks} chunks), over "
                    f"memory_cap_bytes={memory_cap_bytes:g}; raise it, or choose schedule=auto, which keeps to it"
                )
                raise ScheduleError(reason, schedule, rank, index)


def _check_cells(schedule: Schedule) -> None:
    """Check each cell by itself, and that no action occurs twice."""
    if schedule.num_ranks != schedule.placement.num_ranks:
        raise ValueError(
            f"schedule {schedule.name!r}: {schedule.num_ranks} rows, its placement has {schedule.placement.num_ranks} "
            f"ranks; write one row per rank"
        )
    moves = crossings(schedule.placement)
    seen: set[tuple[Action, int]] = set()
    for rank, row in enumerate(schedule.rows):
        for index, slot in enumerate(row):
            for action in slot:
                reason = _cell_fault(schedule, moves, action)
                if not reason:
                    reason = _place_fault(schedule.placement, action, rank)
                if not reason and (action, rank) in seen and action.op not in (Op.UNSHARD, Op.RESHARD):
                    reason = f"{action} stands twice"
                if reason:
                    raise ScheduleError(reason, schedule, rank, index)
                seen.add((action, rank))
            if len(slot) > 1 and not _is_pair(slot):
                reason = "a pair is a forward and a backward of different micro-batches, in this order"
                raise ScheduleError(reason, schedule, rank, index)


def _cell_fault(schedule: Schedule, moves: Set[tuple[Op, int]], action: Action) -> str:
    placement = schedule.placement
    if not 0 <= action.stage < placement.num_stages:
        return f"{action}: there are {placement.num_stages} virtual stages"
    if action.microbatch is not None and not 0 <= action.microbatch < schedule.num_microbatches:
        return f"{action}: there are {schedule.num_microbatches} micro-batches"
    moved = {Op.RELAY_F: Op.SEND_F, Op.RELAY_B: Op.SEND_B}.get(action.op, action.op)
    if (moved in SENDS or moved in RECEIVES) and (moved, action.stage) not in moves:
        return f"{action}: nothing moves there between ranks"
    if action.op is Op.STEP and action.stage != placement.rank_stages[placement.stage_ranks[action.stage]][0]:
        return f"{action}: STEP names the lowest stage of its rank"
    return ""


def _place_fault(placement: Placement, action: Action, rank: int) -> str:
    home, each = placement.stage_ranks[action.stage], placement.num_ranks // placement.pipelines
    if action.op not in RELAYS:
        return "" if home == rank else f"{action} stands on rank {rank}, its stage is on rank {home}"
    if home != rank and home % each == rank % each:
        return ""
    return f"{action} stands on rank {rank}; relays of rank {home} are the ranks in its place in other pipelines"


def _is_pair(slot: tuple[Action, ...]) -> bool:
    return len(slot) == 2 and slot[0].op is Op.F and slot[1].op in BACKWARD and slot[0].microbatch != slot[1].microbatch


def _check_whole(schedule: Schedule) -> None:
    """Check that no action is missing, and that no backward is both full and split."""
    actions = {a: (rank, i) for rank, row in enumerate(schedule.rows) for i, slot in enumerate(row) for a in slot}
    ranks = schedule.placement.stage_ranks
    for half, place in actions.items():
        full = half._replace(op=Op.B)
        if half.op in (Op.I, Op.W) and full in actions:
            raise ScheduleError(f"{half} is redundant with {full}, which includes it", schedule, *place)
    for action in _expected(schedule):
        full = action._replace(op=Op.B)
        if action not in actions and not (action.op in BACKWARD and full in actions):
            rank = ranks[action.stage]
            either = f" (or {full})" if action.op in BACKWARD else ""
            raise ScheduleError(f"{action}{either} is missing", schedule, rank, len(schedule.rows[rank]))


def _check_sharded(schedule: Schedule) -> None:
    """Check that a stage gathers its weights again after each ``RESHARD`` before it uses them."""
    for rank, row in enumerate(schedule.rows):
        away: set[int] = set()
        for index, slot in enumerate(row):
            for action in slot:
                if action.op is Op.RESHARD:
                    away.add(action.stage)
                elif action.op is Op.UNSHARD:
                    away.discard(action.stage)
                elif action.op in WEIGHT_USERS and action.stage in away:
                    reason = f"{action} comes after {Action(Op.RESHARD, action.stage)} without an UNSHARD between them"
                    raise ScheduleError(reason, schedule, rank, index)


def _check_offloaded(schedule: Schedule) -> None:
    """Check that a backward has all of its activations on the device, and that none are offloaded after it."""
    for rank, row in enumerate(schedule.rows):
        away: set[tuple[int, int | None]] = set()
        freed: set[tuple[int, int | None]] = set()
        for index, slot in enumerate(row):
            for action in slot:
                op, chunk = action.op, action[1:]
                reason = ""
                if op is Op.OFFLOAD:
                    away.add(chunk)
                    reason = f"{action} comes after the backward that frees its activations" if chunk in freed else ""
                elif op is Op.RELOAD:
                    away.discard(chunk)
                elif op is Op.B or op is Op.I:
                    freed.add(chunk)
                    reason = f"{action} comes after its OFFLOAD without a RELOAD between them" if chunk in away else ""
                if reason:
                    raise ScheduleError(reason, schedule, rank, index)


def _expected(schedule: Schedule) -> Iterator[Action]:
    """Yield every action that must be present, with each backward as ``I`` and ``W``."""
    placement = schedule.placement
    every_stage = range(placement.num_stages)
    moves = crossings(placement) if schedule.ops & (SENDS | RECEIVES) else frozenset()
    per_microbatch = [(op, stage) for op in (Op.F, Op.I, Op.W) for stage in every_stage]
    per_microbatch += sorted(moves, key=lambda move: (move[1], move[0].value))
    for op, stage in per_microbatch:
        for microbatch in range(schedule.num_microbatches):
            yield Action(op, stage, microbatch)
    for op in (Op.REDUCE_GRAD, Op.UNSHARD):
        if op in schedule.ops:
            yield from (Action(op, stage) for stage in every_stage)
    if Op.STEP in schedule.ops:
        yield from (Action(Op.STEP, held[0]) for held in placement.rank_stages)
