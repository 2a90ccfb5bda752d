"""Segment plans for the strand pairs of schedules."""

from __future__ import annotations

from collections.abc import Iterable

from weft.pipeline.action import Op, Slot, is_pair
from weft.pipeline.schedule import Schedule
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.plan import SegmentPlan


def pair_name(pair: Slot) -> str:
    """Return the common name of pairs that follow one plan, such as ``0F+3B``."""
    return "+".join(f"{action.stage}{action.op.value}" for action in pair)


def plans_for(schedules: Iterable[Schedule], costs: StrandCosts | None, num_stages: int) -> dict[str, SegmentPlan]:
    """The plan of each pair in some schedules of a run, by `pair_name` of any of its pipelines.

    Args:
        schedules: schedules of DP-cells, whose pipelines are alike.
        costs: costs of one pipeline, or None if the segments of layers are unknown, and nothing is planned.
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
