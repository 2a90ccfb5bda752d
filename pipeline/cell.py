"""The DP-cell: replicas of a pipeline that take turns on their pooled WAN uplinks (Atlas section 4.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.pipeline.action import RELAYS, SENDS, Action, Op, Slot
from weft.pipeline.costs import CostModel
from weft.pipeline.order import Visit, execution_order
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import SimulatedStep, simulate
from weft.pipeline.timeline import Timeline

_RELAY_OF = {Op.SEND_F: Op.RELAY_F, Op.SEND_B: Op.RELAY_B}


def side_by_side(schedule: Schedule, pipelines: int) -> Schedule:
    """Return a cell of ``pipelines`` pipelines. Each of them runs ``schedule`` on its own micro-batches."""
    stages = schedule.placement.num_stages
    rows = [[_moved(slot, number * stages) for slot in row] for number in range(pipelines) for row in schedule.rows]
    return replace(schedule, placement=replace(schedule.placement, pipelines=pipelines)).with_rows(rows)


def pipeline_of(cell: Schedule, local_rank: int) -> Schedule:
    """Return the schedule of one pipeline of a cell by its LocalDPRank, without relays (the transport's part)."""
    single = cell.placement.single
    first_row, first_stage = local_rank * single.num_ranks, local_rank * single.num_stages
    own = cell.rows[first_row : first_row + single.num_ranks]
    rows = [[_moved(slot, -first_stage) for slot in row if slot[0].op not in RELAYS] for row in own]
    return replace(cell, placement=single).with_rows(rows)


def _moved(slot: Slot, stages: int) -> Slot:
    """Return the slot with its stage numbers increased by ``stages``, as in a later pipeline of the cell."""
    return tuple(action._replace(stage=action.stage + stages) for action in slot)


def cell_step_s(cell: Schedule, costs: CostModel) -> float:
    """Return the seconds of a cell's step: until the last of its pipelines has finished.

    Args:
        cell: lowered, with relays.
        costs: the costs of one pipeline.
    """
    pipelines = cell.placement.pipelines
    return simulate(cell, costs if pipelines == 1 else costs.for_cell(pipelines)).step_s


def predict(cell: Schedule, costs: CostModel, local_rank: int) -> Timeline:
    """Simulate a whole cell, and return the timeline of one pipeline by its LocalDPRank."""
    placement = cell.placement
    if placement.pipelines == 1:
        return simulate(cell, costs)
    whole = simulate(cell, costs.for_cell(placement.pipelines))
    single = placement.single
    ranks = range(local_rank * single.num_ranks, (local_rank + 1) * single.num_ranks)
    first_stage = local_rank * single.num_stages
    spans = [
        replace(
            span,
            rank=span.rank - ranks.start,
            lane=span.lane.counted_from(ranks.start),
            slot=_moved(span.slot, -first_stage),
        )
        for span in whole.spans
        if span.rank in ranks and span.slot[0].op not in RELAYS
    ]
    return replace(
        whole,
        num_ranks=single.num_ranks,
        spans=tuple(spans),
        peak_bytes=whole.peak_bytes[ranks.start : ranks.stop],
        live_microbatches=whole.live_microbatches[ranks.start : ranks.stop],
    )


def uplink_order(cell: Schedule, rank: int) -> list[Action]:
    """Return the transfers that the uplink of ``rank`` carries, for this rank and for its peers, in row order."""
    return [action for action in cell.actions(rank) if action.op in RELAYS or _crosses(cell.placement, action)]


def add_relays(cell: Schedule, costs: CostModel) -> Schedule:
    """Add ``RELAY`` actions: the peers' transfers that each rank's uplink carries (a lowering pass).

    Peers are the ranks at the same position of the other pipelines. A relay is placed in the row
    of every peer of the sender where the transfer is posted, so that all of them carry transfers
    in one order: by posting time, then by micro-batch and LocalDPRank. Relays block nothing.

    Args:
        cell: lowered, with transfers.
        costs: the costs of the cell (see `CostModel.for_cell`), which decide the order.
    """
    placement = cell.placement
    if placement.pipelines == 1 or cell.ops & RELAYS:
        return cell
    starts_s, posts = _timed(cell, costs)
    each = placement.single.num_ranks
    rows = []
    for rank, row in enumerate(cell.rows):
        others = [post for post in posts if post.rank != rank and post.rank % each == rank % each]
        rows.append(list(_merged(row, starts_s[rank], others, placement)))
    return cell.with_rows(rows)


class _Post(NamedTuple):
    """A transfer between sites; sorts in the order in which the uplinks carry it."""

    posted_s: float
    microbatch: int
    stage: int
    direction: str
    rank: int
    action: Action


def _timed(cell: Schedule, costs: CostModel) -> tuple[list[list[float]], list[_Post]]:
    """Return the earliest start of each slot by row, and the transfers between sites in the order of the uplinks."""
    run = SimulatedStep(cell, costs)
    starts_s: list[list[float]] = [[] for _ in cell.rows]
    posts: list[_Post] = []

    def post_of(visit: Visit) -> _Post:
        (action,) = visit.slot
        assert action.microbatch is not None
        posted_s = run.could_start_s(visit)
        return _Post(posted_s, action.microbatch, action.stage, action.op.value, visit.rank, action)

    for visit in execution_order(cell, send_key=post_of):
        starts_s[visit.rank].append(run.could_start_s(visit))
        if _crosses(cell.placement, visit.slot[0]):
            posts.append(post_of(visit))
        run.step(visit)
    return starts_s, posts


def _merged(
    row: Sequence[Slot], starts_s: Sequence[float], others: Sequence[_Post], placement: Placement
) -> Iterator[Slot]:
    """Yield a row with the relays of ``others`` inserted, each before the slots that start later.

    Transfers stay in order.
    """
    waiting = deque(sorted(others))
    for slot, start_s in zip(row, starts_s, strict=True):
        # Transfers go in posting order; any other slot that starts at the same time goes first.
        _, stage, microbatch = slot[0]
        key: tuple[Any, ...] = (start_s, microbatch, stage) if _crosses(placement, slot[0]) else (start_s,)
        while waiting and waiting[0][: len(key)] < key:
            yield _relay(waiting.popleft())
        yield slot
    yield from map(_relay, waiting)


def _relay(post: _Post) -> Slot:
    return (post.action._replace(op=_RELAY_OF[post.action.op]),)


def _crosses(placement: Placement, action: Action) -> bool:
    if action.op not in SENDS:
        return False
    return placement.crosses_wan(action.stage if action.op is Op.SEND_F else action.stage - 1)
