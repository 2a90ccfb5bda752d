"""The priority rules that `auto` gives to the list scheduler, most useful first."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from weft.pipeline.action import Op
from weft.pipeline.generators.auto_bound import lone_microbatch, pace_s
from weft.pipeline.generators.auto_greedy import Rule
from weft.pipeline.generators.auto_problem import Problem

# Critical-path rules as `(pace, weight_delay, wait_share, backlog)`. Chosen greedily from 500: each
# improves most on those above it, over 60 random pipelines of 2-12 ranks and 1-32 micro-batches.
_CRITICAL_PATHS = (
    (1.0, inf, 0.3, 0.5),
    (1.5, inf, 0.5, inf),
    (1.0, 1.0, 0.99, 0.5),
    (0.5, inf, 0.5, 0.5),
    (0.75, 1.0, 0.0, 0.0),
    (0.75, inf, 0.0, inf),
    (1.25, inf, 0.99, 0.0),
    (0.5, inf, 0.3, 0.5),
    (1.25, 1.0, 0.99, inf),
    (1.0, 1.0, 0.3, inf),
    (0.75, 0.5, 0.99, inf),
    (0.5, inf, 0.0, 2.0),
    (1.0, inf, 0.99, inf),
    (0.5, inf, 0.99, inf),
    (0.5, 0.5, 0.3, inf),
    (0.5, inf, 0.3, inf),
)


def rules(problem: Problem) -> Iterator[Rule]:
    """Yield the rules in the order in which to try them."""
    kinds = pair_kinds(problem)
    yield from (backward_first(problem, pair=pair) for pair in kinds)
    yield from (
        atlas(problem, defer_weights=defer_weights, pair=pair) for defer_weights in (False, True) for pair in kinds
    )
    for pace, weight_delay, wait_share, backlog in _CRITICAL_PATHS:
        for pair in kinds:
            yield critical_path(
                problem, pace=pace, weight_delay=weight_delay, wait_share=wait_share, backlog=backlog, pair=pair
            )
    yield backward_first(problem, wait_share=0.99)


def pair_kinds(problem: Problem) -> tuple[Op | None, ...]:
    """Return the kinds of backward to pair with forwards; only None if pairs gain nothing."""
    return (None,) if problem.least_pair_scale >= 1 else (Op.B, Op.I, None)


def backward_first(problem: Problem, *, wait_share: float = 0.0, pair: Op | None = None) -> Rule:
    """Input gradients first (Atlas section 4.4, rule 4), then forwards, then weight gradients.

    Among forwards the deepest stage goes first, among gradients the oldest micro-batch.
    """
    stages = problem.placement.num_stages
    spread = pace_s(problem) * problem.num_microbatches * (stages + 1)
    priority_s = tuple((-spread * stage, -spread * (stages + 1), spread) for stage in range(stages))
    return Rule(priority_s=priority_s, pace_s=pace_s(problem), wait_share=wait_share, pair=pair)


def atlas(problem: Problem, *, defer_weights: bool, pair: Op | None = None) -> Rule:
    """Atlas's heuristic: the four rules of section 4.4 together.

    The pipelines of a DP-cell share their uplinks (1), no rank exceeds the memory cap (2), an
    action starts only if its transfer can start right after it (3), and backwards go first (4).

    Args:
        defer_weights: leave weight gradients for idle time; Atlas itself does not split backwards.
    """
    stages = problem.placement.num_stages
    spread = pace_s(problem) * problem.num_microbatches * (stages + 1)
    weight_s = spread if defer_weights else -spread * (stages + 2)
    priority_s = tuple((-spread * stage, -spread * (stages + 1), weight_s) for stage in range(stages))
    return Rule(
        priority_s=priority_s, pace_s=pace_s(problem), wait_share=0.0, backlog=0.0, backlog_of_gradients=True, pair=pair
    )


def critical_path(
    problem: Problem,
    *,
    pace: float,
    weight_delay: float,
    wait_share: float,
    backlog: float = inf,
    pair: Op | None = None,
) -> Rule:
    """Give each action the time at which a lone micro-batch reaches it as its priority; the earliest goes first.

    Args:
        pace: time between successive micro-batches, in units of `pace_s` (the busiest rank or link).
        weight_delay: how long a weight gradient may be deferred, in the same unit.
        wait_share, backlog, pair: see `Rule`.
    """
    step_s = pace_s(problem)
    forward_s, backward_s, end_s = lone_microbatch(problem)
    never_s = end_s + 4 * step_s * problem.num_microbatches
    priority_s = tuple(
        (ahead_s, back_s, min(back_s + cost.input_s + weight_delay * step_s, never_s))
        for ahead_s, back_s, cost in zip(forward_s, backward_s, problem.costs.stages, strict=True)
    )
    return Rule(priority_s=priority_s, pace_s=pace * step_s, wait_share=wait_share, backlog=backlog, pair=pair)
