"""Fit the cost model to measured timelines, so that the simulator predicts this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from weft.pipeline.action import SENDS, Op
from weft.pipeline.costs import SECONDS_OF, CostModel, StageCost
from weft.pipeline.timeline import SEND_LANE, Timeline


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


def _fit_stage(stage: int, cost: StageCost, medians: dict[tuple[Op, int], float]) -> StageCost:
    whole = medians.get((Op.B, stage), cost.input_s + cost.weight_s)
    measured = {SECONDS_OF[op]: s for (op, at), s in medians.items() if at == stage and op in SECONDS_OF}
    return replace(cost, **{"input_s": whole / 2, "weight_s": whole / 2} | measured)
