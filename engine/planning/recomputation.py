"""The choice of what each virtual stage computes again in its backward, so that activations fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

LEVELS = (Recompute.none, Recompute.elementwise, Recompute.attention, Recompute.layers)
Choice = tuple[Recompute, ...]
"""The recomputation of each virtual stage."""
_SHARES = (1.0, 0.7, 0.5, 0.3)
"""Shares of the limit from which the search starts."""


@dataclass(frozen=True)
class RecomputeSearch:
    """The search for the recomputation of each virtual stage that makes a step shortest (`pipeline.recompute=auto`).

    While activations do not fit, it adds the recomputation that frees the most excess bytes per second. It does so
    for the limit and for smaller ones, because more micro-batches in flight may pay. From the best result it takes
    the single change that shortens the step most, until none does.

    Attributes:
        limit_bytes: bytes of activations that each rank may hold.
        costs_of: returns the costs of one pipeline with a choice.
        schedule_of: returns the schedule of a step without a memory cap, if the schedule is fixed.
        levels: the choices for a virtual stage.
    """

    config: WeftConfig
    placement: Placement
    limit_bytes: float
    costs_of: Callable[[Choice], CostModel]
    schedule_of: Callable[[CostModel], Schedule]
    levels: tuple[Recompute, ...] = LEVELS

    def choose(self) -> Choice:
        """Return the best choice that was found."""
        num_stages = self.placement.num_stages
        starts = {choice for share in _SHARES if (choice := self._start(share * self.limit_bytes)) is not None}
        if not starts:
            return (Recompute.layers,) * num_stages  # the schedule's own error names the cap
        ordered = sorted(starts, key=lambda choice: [LEVELS.index(kind) for kind in choice])
        best, choice = min(((self._step_s(choice), choice) for choice in ordered), key=itemgetter(0))
        while True:
            able = [other for other in self._changes(choice) if self._least_s(other) < best]
            times = ((self._step_s(other), other) for other in able)
            found, other = min(times, default=(best, choice), key=itemgetter(0))
            if found >= best:
                return choice
            choice, best = other, found

    def _start(self, limit_bytes: float) -> Choice | None:
        """Add recomputation until activations fit. Return None if they never do."""
        choice = (Recompute.none,) * self.placement.num_stages
        while over := self._excess(choice, limit_bytes):
            spent_s = _seconds(self.costs_of(choice))
            freed = [
                ((over - left) / max(_seconds(self.costs_of(other)) - spent_s, 1e-12), other)
                for left, other in ((self._excess(other, limit_bytes), other) for other in self._changes(choice))
                if left < over
            ]
            if not freed:
                return None
            _, choice = max(freed, key=itemgetter(0))
        return choice

    def _changes(self, choice: Choice) -> list[Choice]:
        """Return all choices that differ in one stage."""
        return [
            (*choice[:stage], level, *choice[stage + 1 :])
            for stage, chosen in enumerate(choice)
            for level in self.levels
            if level is not chosen
        ]

    @property
    def _capped(self) -> bool:
        return self.config.pipeline.schedule.name == "auto"

    def _excess(self, choice: Choice, limit_bytes: float) -> float:
        """Return the bytes over the limit, summed over ranks."""
        costs = self.costs_of(choice)
        held = _least_held(self.placement, costs) if self._capped else _held(self.schedule_of(costs), costs)
        return sum(max(0.0, num_bytes - limit_bytes) for num_bytes in held)

    def _step_s(self, choice: Choice) -> float:
        """Return the seconds of a step, or infinity if activations do not fit."""
        costs = self.costs_of(choice)
        if self._excess(choice, self.limit_bytes):
            return inf
        if not self._capped:
            return simulate(self.schedule_of(costs), costs).step_s
        return quick_step_s(self.placement, self.config.pipeline.microbatches, costs, self.limit_bytes)

    def _least_s(self, choice: Choice) -> float:
        """Return a lower bound on the seconds of a step, whatever the links."""
        costs = CostModel(stages=self.costs_of(choice).stages)
        return lower_bound_s(Problem(self.placement, self.config.pipeline.microbatches, costs))


def choice_text(choice: Sequence[Recompute]) -> str:
    """Return the stages of each kind of recomputation, or an empty string without any."""
    named = {kind: [str(stage) for stage, chosen in enumerate(choice) if chosen is kind] for kind in LEVELS[1:]}
    parts = [f"{kind.name} of stages {', '.join(stages)}" for kind, stages in named.items() if stages]
    return f"backwards recompute {' and '.join(parts)}" if parts else ""


def _seconds(costs: CostModel) -> float:
    return sum(stage.input_s for stage in costs.stages)


def _least_held(placement: Placement, costs: CostModel) -> list[float]:
    """Return the bytes that a single micro-batch holds on each rank."""
    return [sum(costs.stages[stage].activation_bytes for stage in held) for held in placement.rank_stages]


def _held(schedule: Schedule, costs: CostModel) -> list[float]:
    return [max((held.num_bytes for held in held_along(row, costs)), default=0.0) for row in schedule.rows]
