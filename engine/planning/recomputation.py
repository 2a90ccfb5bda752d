"""The choice of what each virtual stage computes again in its backward, so that activations fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from operator import itemgetter

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
_SHARES = (1.0, 0.7, 0.5, 0.3)
"""Shares of the limit from which the search starts."""


def choose_recompute(
    config: WeftConfig,
    placement: Placement,
    limit_bytes: float,
    costs_of: Callable[[Choice], CostModel],
    schedule_of: Callable[[CostModel], Schedule],
) -> Choice:
    """Return the configured recomputation of each virtual stage, or with `auto` the one with the shortest step.

    While activations do not fit, the search adds the recomputation that frees the most excess bytes per second. It does
    so for the limit and for smaller ones, because more micro-batches in flight may pay. From the best result it takes
    the single change that shortens the step most, until none does.

    Args:
        limit_bytes: bytes of activations that each rank may hold.
        costs_of: returns the costs of one pipeline with a choice.
        schedule_of: returns the schedule of a step without a memory cap, if the schedule is fixed.
    """
    if config.pipeline.recompute is not Recompute.auto:
        return (config.pipeline.recompute,) * placement.num_stages
    capped = config.pipeline.schedule.name == "auto"

    def excess(choice: Choice, limit_bytes: float) -> float:
        """Return the bytes over the limit, summed over ranks."""
        costs = costs_of(choice)
        held = _least_held(placement, costs) if capped else _held(schedule_of(costs), costs)
        return sum(max(0.0, num_bytes - limit_bytes) for num_bytes in held)

    def step_s(choice: Choice) -> float:
        """Return the seconds of a step, or infinity if activations do not fit."""
        costs = costs_of(choice)
        if excess(choice, limit_bytes):
            return inf
        if not capped:
            return simulate(schedule_of(costs), costs).step_s
        return quick_step_s(placement, config.pipeline.microbatches, costs, limit_bytes)

    def changes(choice: Choice) -> list[Choice]:
        return [
            (*choice[:stage], level, *choice[stage + 1 :])
            for stage in range(placement.num_stages)
            for level in LEVELS
            if level is not choice[stage]
        ]

    def start(limit_bytes: float) -> Choice | None:
        """Add recomputation until activations fit. Return None if they never do."""
        choice = (Recompute.none,) * placement.num_stages
        while over := excess(choice, limit_bytes):
            spent_s = _seconds(costs_of(choice))
            freed = [
                ((over - left) / max(_seconds(costs_of(other)) - spent_s, 1e-12), other)
                for left, other in ((excess(other, limit_bytes), other) for other in changes(choice))
                if left < over
            ]
            if not freed:
                return None
            _, choice = max(freed, key=lambda entry: entry[0])
        return choice

    starts = {choice for share in _SHARES if (choice := start(share * limit_bytes)) is not None}
    if not starts:
        return (Recompute.layers,) * placement.num_stages  # the schedule's own error names the cap
    ordered = sorted(starts, key=lambda choice: [LEVELS.index(kind) for kind in choice])
    best, choice = min(((step_s(choice), choice) for choice in ordered), key=itemgetter(0))
    while True:
        able = [other for other in changes(choice) if _least_s(config, placement, costs_of(other)) < best]
        found, other = min(((step_s(other), other) for other in able), default=(best, choice), key=itemgetter(0))
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
