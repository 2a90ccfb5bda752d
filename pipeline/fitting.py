"""Costs fitted to measured timelines, so that the simulator predicts the machine at hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from weft.pipeline.action import SENDS, Op
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.timeline import Timeline


def fit_costs(timelines: Sequence[Timeline], costs: CostModel) -> CostModel:
    """``costs`` with each stage's seconds replaced by the median that was measured.

    A stage whose backward was never split is taken to spend half of it on each gradient.
    Strand pairs are left out, for their halves are not timed apart.

    Args:
        timelines: measured steps of one schedule.
        costs: links, bytes, and seconds of whatever was not measured.
    """
    seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            if len(span.slot) == 1 and (span.slot[0].op not in SENDS or span.lane == "send"):
                action = span.slot[0]
                op = Op.SEND_F if action.op in SENDS else action.op  # both ways cost alike
                seconds[op, action.stage].append(span.end_s - span.start_s)
    middle = {key: median(values) for key, values in seconds.items()}
    return replace(costs, stages=tuple(_fit_stage(s, cost, middle) for s, cost in enumerate(costs.stages)))


def _fit_stage(stage: int, cost: StageCost, middle: dict[tuple[Op, int], float]) -> StageCost:
    def seen(op: Op, fallback: float) -> float:
        return middle.get((op, stage), fallback)

    whole = seen(Op.B, cost.input_s + cost.weight_s)
    return replace(
        cost,
        forward_s=seen(Op.F, cost.forward_s),
        input_s=seen(Op.I, whole / 2),
        weight_s=seen(Op.W, whole / 2),
        reduce_s=seen(Op.REDUCE_GRAD, cost.reduce_s),
        unshard_s=seen(Op.UNSHARD, cost.unshard_s),
        step_s=seen(Op.STEP, cost.step_s),
        send_s=seen(Op.SEND_F, cost.send_s),
    )
