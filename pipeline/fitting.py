"""Fit the cost model to measured timelines, so that the simulator predicts this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from weft.conf.measurements import spread_of
from weft.pipeline.action import SENDS, Op
from weft.pipeline.costs import SECONDS_OF, CostModel, StageCost
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.timeline import SEND_LANE, Timeline

Kinds = tuple[tuple[bool, Op, int], ...]
"""The actions of a slot, a forward first, without their micro-batches."""
_HALVINGS = 20


def fit_costs(timelines: Sequence[Timeline], costs: CostModel) -> CostModel:
    """Replace each stage's seconds in ``costs`` by the measured median.

    If a stage never split its backward, half of the backward counts for each gradient. Strand
    pairs are ignored, because their halves are not timed separately.

    Args:
        timelines: measured steps of one schedule.
        costs: provides links and bytes, and the seconds of actions that were not measured.
    """
    seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            if len(span.slot) == 1 and (span.slot[0].op not in SENDS or span.lane == SEND_LANE):
                action = span.slot[0]
                op = Op.SEND_F if action.op in SENDS else action.op  # both directions cost the same
                seconds[op, action.stage].append(span.end_s - span.start_s)
    medians = {key: median(values) for key, values in seconds.items()}
    return replace(costs, stages=tuple(_fit_stage(s, cost, medians) for s, cost in enumerate(costs.stages)))


def fit_overlap(timelines: Sequence[Timeline], costs: CostModel) -> tuple[OverlapTable, float] | None:
    """Return the overlap of operators at which strand pairs take as long as measured, and how much faster they were.

    All factors are moved by the same share towards 0 or 1. A pair counts if its halves ran alone elsewhere in the
    steps, so that the speed of the device plays no part.

    Args:
        costs: the costs with which the steps were planned.
    """
    if (pairs := costs.pairs) is None:
        return None
    seconds: dict[Kinds, list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            kinds = tuple(sorted((action.op is not Op.F, action.op, action.stage) for action in span.slot))
            seconds[kinds].append(span.end_s - span.start_s)
    alone = {kinds[0]: median(values) for kinds, values in seconds.items() if len(kinds) == 1}
    measured = {
        (kinds[0][-1], kinds[1][-1], kinds[1][1] is Op.B): median(values) / (alone[kinds[0]] + alone[kinds[1]])
        for kinds, values in seconds.items()
        if len(kinds) == 2 and alone.keys() >= {*kinds}
    }
    if not measured:
        return None

    def faster(share: float) -> list[float]:
        table = pairs.overlap.moved(share)
        return [pairs.scale_under(table, *pair) / scale for pair, scale in measured.items()]

    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if median(faster(middle)) > 1 else (low, middle)
    ratios = faster(0.0)
    return replace(pairs.overlap.moved(low), spread=spread_of(ratios, median(ratios))), median(ratios)


def _fit_stage(stage: int, cost: StageCost, medians: dict[tuple[Op, int], float]) -> StageCost:
    whole = medians.get((Op.B, stage), cost.input_s + cost.weight_s)
    measured = {SECONDS_OF[op]: s for (op, at), s in medians.items() if at == stage and op in SECONDS_OF}
    return replace(cost, **{"input_s": whole / 2, "weight_s": whole / 2} | measured)
