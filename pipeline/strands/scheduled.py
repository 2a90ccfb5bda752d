"""Segment plans for the strand pairs of schedules."""

from __future__ import annotations

from collections.abc import Iterable

from weft.pipeline.action import Op, Slot, is_pair
from weft.pipeline.schedule import Schedule
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.plan import SegmentPlan


def pair_name(pair: Slot) -> str:
    """Return the name of the plan of a pair, such as ``0F+3B``; all pairs of these stages and operations share it."""
    return "+".join(f"{action.stage}{action.op.value}" for action in pair)


def plans_for(schedules: Iterable[Schedule], costs: StrandCosts | None, num_stages: int) -> dict[str, SegmentPlan]:
    """Return the segment plans of all pairs in a run's schedules, by `pair_name`.

    Args:
        schedules: schedules of DP-cells, whose pipelines are alike.
        costs: costs of one pipeline. None means that the segments of layers are unknown; then nothing is planned.
        num_stages: virtual stages of a pipeline.
    """
    if costs is None:
        return {}
    plans: dict[str, SegmentPlan] = {}
    for slot in {slot for schedule in schedules for row in schedule.rows for slot in row if is_pair(slot)}:
        one, other = (action._replace(stage=action.stage % num_stages) for action in slot)
        name = pair_name((one, other))
        if name not in plans:
            plans[name] = costs.plan(one.stage, other.stage, weights=other.op is Op.B)
    return plans
