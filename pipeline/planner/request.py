"""The request: the training, the objective, and the constraints of a plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from weft.pipeline.limits import count, number, short_repr
from weft.pipeline.memory import USABLE
from weft.pipeline.planner.layout import LEGS, Layout, Prediction


class Objective(Enum):
    """The quantity that the best plan minimises."""

    throughput = "throughput"
    cost = "cost"
    latency = "latency"
    time_to_tokens = "time-to-tokens"


EQUAL = 1e-9
"""Scores that differ by a smaller share are equal; sums of the same times differ by their rounding."""
FREE = 1e-6
"""Money of an hour of GPUs without a price, so that of plans that cost nothing the fastest is the best."""
MOST_CELL = 8
"""Replicas that are compared as one DP-cell; more is rarely better (Atlas takes communication over compute)."""
PINS = {
    # what may be fixed: the layout's field
    "pipeline.stages": "num_stages",
    "pipeline.microbatches": "microbatches",
    "pipeline.schedule": "schedule",
    "pipeline.placement": "arrangement",
    "train.microbatch_size": "microbatch_size",
    "replicas": "replicas",
    "cluster.routes": "routes",
    "comm.cell": "cell",
    "zero.stage": "zero_stage",
    "parallel.tensor": "tensor",
    "parallel.context": "context",
    "parallel.expert": "expert",
    "pipeline.recompute": "checkpointing",
}
"""Fields that a request may fix, by their names in the configuration."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request for a plan.

    Attributes:
        sequences: sequences of a step over all replicas; with 0 it follows from pinned micro-batches.
        tokens: number of training tokens, for hours and cost.
        max_memory: share of a GPU's memory that a plan may fill.
        max_sites: maximum number of sites of a pipeline; 0 is no limit.
        max_cost_per_hour: maximum cost of all GPUs; 0 is no limit.
        home: numbers of the sites where data has to stay; empty means anywhere. The first pipeline rank reads tokens
            and the last one labels, so both have to be there.
        pins: required values, by the field of a layout.
        effort: maximum number of actions that may be scheduled to compare layouts.
    """

    sequences: int
    objective: Objective = Objective.throughput
    tokens: float = 1e12
    max_memory: float = USABLE
    max_sites: int = 0
    max_cost_per_hour: float = 0.0
    home: frozenset[int] = frozenset()
    pins: Mapping[str, Any] = field(default_factory=dict)
    effort: int = 60_000

    def choices(self, name: str, found: list[Any]) -> list[Any]:
        """Return the possible values of a layout's field: the pinned value, or all candidates."""
        return [self.pins[name]] if name in self.pins else found

    def score(self, found: Prediction) -> float:
        """Return the quantity that the objective minimises. See `score_of`."""
        return self.score_of(found.step_s, found.layout, found.price_per_hour, found.egress_per_step, found.tokens)

    def ranked(self, found: Iterable[Prediction]) -> list[Prediction]:
        """Return predictions, the best first.

        Of equal scores the cheaper prediction comes first, and of equal costs the faster one.
        """
        ranked: list[Prediction] = []
        equal: list[Prediction] = []
        for one in sorted(found, key=self.score):
            if equal and self.score(one) > self.score(equal[0]) * (1 + EQUAL):
                ranked += sorted(equal, key=self._second)
                equal = []
            equal.append(one)
        return ranked + sorted(equal, key=self._second)

    def _second(self, found: Prediction) -> float:
        return found.step_s if self.objective is Objective.cost else found.cost(1.0)

    def score_of(self, step_s: Any, layout: Layout | None, price_per_hour: Any, egress: float, tokens: Any) -> Any:
        """Return the score of a step: seconds or cost per token, or seconds per step, by the objective.

        It grows with ``step_s`` and prices. The arguments may be arrays.
        """
        if self.objective is Objective.latency:
            return step_s
        if self.objective is Objective.cost:
            return ((price_per_hour + FREE) * step_s / 3600 + egress) / tokens
        return step_s / tokens

    def bound_of(self, step_s: float, price_per_hour: float, price_seconds: float, egress: float, tokens: int) -> float:
        """Return the lower bound of the score for a least duration and a least cost per hour.

        Args:
            price_seconds: hourly prices times seconds that have to be paid at least, whatever the duration of a step.
        """
        bound = self.score_of(step_s, None, price_per_hour, egress, tokens)
        if self.objective is Objective.cost:
            return max(bound, (price_seconds / 3600 + egress) / tokens)
        return bound

    def step_of(self, score: float, price_per_hour: float, egress: float, tokens: int) -> float:
        """Return the seconds of a step with this score: the inverse of `score_of`."""
        if self.objective is Objective.latency:
            return score
        if self.objective is Objective.cost:
            return (score * tokens - egress) * 3600 / (price_per_hour + FREE)
        return score * tokens


def read_pins(words: list[str]) -> dict[str, Any]:
    """Return pins from words such as ``pipeline.stages=8``.

    Raises:
        ValueError: a field cannot be fixed, or not to this value.
    """
    pins: dict[str, Any] = {}
    for word in words:
        name, given, value = word.partition("=")
        if not given or name not in PINS:
            near = difflib.get_close_matches(name, PINS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(PINS)}"
            raise ValueError(f"{word}: a plan has no such field to fix; {hint}")
        pins[PINS[name]] = _value(name, value)
    _require_together(pins)
    return pins


def _require_together(pins: Mapping[str, Any]) -> None:
    """Refuse combinations of pins that no run supports."""
    axes = {axis: size for axis in ("tensor", "context", "expert") if (size := pins.get(axis, 1)) > 1}
    if (cell := pins.get("cell", 1)) > 1 and axes:
        named = " and ".join(f"parallel.{axis}={size}" for axis, size in axes.items())
        raise ValueError(
            f"--pin comm.cell={cell}: the pipelines of a DP-cell take turns, and GPUs of {named} work at the same "
            "time; pin one of them to 1"
        )
    tensor, expert = axes.get("tensor", 1), axes.get("expert", 1)
    if expert > 1 and expert % tensor:
        raise ValueError(
            f"--pin parallel.expert={expert}: GPUs that share matrices (parallel.tensor={tensor}) share experts, too; "
            f"choose a multiple of {tensor}, or 1"
        )


def _value(name: str, text: str) -> Any:
    if name == "pipeline.schedule":
        if text not in ("auto", "1f1b"):
            raise ValueError(f"{name}={text}: plans compare auto and 1f1b; choose one of them")
        return text
    if name == "pipeline.placement":
        if text not in LEGS:
            raise ValueError(f"{name}={short_repr(text)}: choose one of {', '.join(LEGS)}")
        return text
    if name == "pipeline.recompute":
        if text not in ("none", "layers"):
            raise ValueError(f"{name}={short_repr(text)}: plans compare none and layers; choose one of them")
        return text == "layers"
    value = number(text, name)
    whole = int(value) if value == int(value) else value
    if name == "zero.stage" and whole not in range(4):
        raise ValueError(f"{name}={text}: choose one of 0, 1, 2 and 3")
    if name == "comm.cell" and whole > MOST_CELL:
        raise ValueError(f"{name}={text}: plans compare DP-cells of at most {MOST_CELL} replicas; choose a smaller one")
    return count(whole, name, least=0 if name == "zero.stage" else 1)
