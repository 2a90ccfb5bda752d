"""The choice of what each virtual stage computes again in its backward, so that activations fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from weft.conf.schema import Recompute, WeftConfig
from weft.pipeline.costs import CostModel
from weft.pipeline.generators.auto import quick_step_s
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.memory import held_along
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate

LEVELS = (Recompute.none, Recompute.attention, Recompute.layers)
Choice = tuple[Recompute, ...]
"""The recomputation of each virtual stage."""


@dataclass(frozen=True, order=True)
class _Result:
    """The result of a choice, which sorts the better one first.

    Attributes:
        excess_bytes: bytes over the limit, summed over ranks.
        step_s: simulated seconds of a step, or infinite if the schedule does not fit.
    """

    excess_bytes: float
    step_s: float


def choose_recompute(
    config: WeftConfig,
    placement: Placement,
    limit_bytes: float,
    costs_of: Callable[[Choice], CostModel],
    schedule_of: Callable[[CostModel], Schedule],
) -> Choice:
    """Return the configured recomputation of each virtual stage, or with `auto` the one with the shortest step.

    The search begins without recomputation. While activations do not fit, it adds the recomputation that frees the
    most excess bytes per second. Then it takes the single change that shortens the step most, until none does.

    Args:
        limit_bytes: bytes of activations that each rank may hold.
        costs_of: returns the costs of one pipeline with a choice.
        schedule_of: returns the schedule of a step without a memory cap, if the schedule is fixed.
    """
    if config.pipeline.recompute is not Recompute.auto:
        return (config.pipeline.recompute,) * placement.num_stages
    capped = config.pipeline.schedule.name == "auto"

    def result(choice: Choice) -> _Result:
        costs = costs_of(choice)
        fixed = None if capped else schedule_of(costs)
        held = _least_held(placement, costs) if fixed is None else _held(fixed, costs)
        if excess_bytes := sum(max(0.0, num_bytes - limit_bytes) for num_bytes in held):
            return _Result(excess_bytes, inf)
        if fixed is not None:
            return _Result(0.0, simulate(fixed, costs).step_s)
        return _Result(0.0, quick_step_s(placement, config.pipeline.microbatches, costs, limit_bytes))

    def changes(choice: Choice) -> list[Choice]:
        return [
            (*choice[:stage], level, *choice[stage + 1 :])
            for stage in range(placement.num_stages)
            for level in LEVELS
            if level is not choice[stage]
        ]

    choice = (Recompute.none,) * placement.num_stages
    best = result(choice)
    while best.excess_bytes:
        spent_s = _seconds(costs_of(choice))
        freed = [
            ((best.excess_bytes - found.excess_bytes) / max(_seconds(costs_of(other)) - spent_s, 1e-12), other, found)
            for found, other in ((result(other), other) for other in changes(choice))
            if found.excess_bytes < best.excess_bytes
        ]
        if not freed:
            return choice  # the schedule's own error names the cap
        _, choice, best = max(freed, key=lambda entry: entry[0])
    while True:
        able = [other for other in changes(choice) if _least_s(config, placement, costs_of(other)) < best.step_s]
        found, other = min(
            ((result(other), other) for other in able), default=(best, choice), key=lambda tried: tried[0]
        )
        if found >= best:
            return choice
        choice, best = other, found


def choice_text(choice: Sequence[Recompute]) -> str:
    """Return the stages of each kind of recomputation, or an empty string without any."""
    named = {
        kind: [str(stage) for stage, chosen in enumerate(choice) if chosen is kind] for kind in (LEVELS[1], LEVELS[2])
    }
    parts = [f"{kind.name} of stages {', '.join(stages)}" for kind, stages in named.items() if stages]
    return f"backwards recompute {' and '.join(parts)}" if parts else ""


def _seconds(costs: CostModel) -> float:
    return sum(stage.input_s for stage in costs.stages)


def _least_s(config: WeftConfig, placement: Placement, costs: CostModel) -> float:
    """Return a lower bound on the seconds of a step, whatever the links."""
    return lower_bound_s(Problem(placement, config.pipeline.microbatches, CostModel(stages=costs.stages)))


def _least_held(placement: Placement, costs: CostModel) -> list[float]:
    """Return the bytes that a single micro-batch holds on each rank."""
    return [sum(costs.stages[stage].activation_bytes for stage in held) for held in placement.rank_stages]


def _held(schedule: Schedule, costs: CostModel) -> list[float]:
    return [max((held.num_bytes for held in held_along(row, costs)), default=0.0) for row in schedule.rows]
