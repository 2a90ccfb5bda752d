"""What the list scheduler is told to want: the rules that `auto` tries, the most useful first."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from weft.pipeline.action import Op
from weft.pipeline.generators.auto_bound import lone_microbatch, pace_s
from weft.pipeline.generators.auto_greedy import Rule
from weft.pipeline.generators.auto_problem import Problem

# Critical-path rules as (pace, owed, patience, queue): out of 500, those that helped the ones
# above them most over 60 random pipelines of 2 to 12 ranks and 1 to 32 micro-batches.
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
    """The rules in the order in which they are worth trying."""
    kinds = pair_kinds(problem)
    yield from (backward_first(problem, pair=pair) for pair in kinds)
    yield from (atlas(problem, put_off=put_off, pair=pair) for put_off in (False, True) for pair in kinds)
    for pace, owed, patience, queue in _CRITICAL_PATHS:
        for pair in kinds:
            yield critical_path(problem, pace=pace, owed=owed, patience=patience, queue=queue, pair=pair)
    yield backward_first(problem, patience=0.99)


def pair_kinds(problem: Problem) -> tuple[Op | None, ...]:
    """Which backwards to pair with forwards: none (None) where a pair gains nothing."""
    return (None,) if problem.costs.pair_scale >= 1 else (Op.B, Op.I, None)


def backward_first(problem: Problem, *, patience: float = 0.0, pair: Op | None = None) -> Rule:
    """Input gradients before forwards (Atlas section 4.4, rule 4: they unlock others) before weight gradients.

    Of several forwards the deepest stage's goes first, of several gradients the oldest.
    """
    stages = problem.placement.num_stages
    far = pace_s(problem) * problem.num_microbatches * (stages + 1)
    wish_s = tuple((-far * stage, -far * (stages + 1), far) for stage in range(stages))
    return Rule(wish_s=wish_s, pace_s=pace_s(problem), patience=patience, pair=pair)


def atlas(problem: Problem, *, put_off: bool, pair: Op | None = None) -> Rule:
    """Atlas's heuristic with the four rules of section 4.4 acting together.

    The pipelines of a DP-cell share their uplinks (1), nothing exceeds the memory cap (2), an
    action starts only when its transfer can follow at once (3), and backwards come first (4).

    Args:
        put_off: leave weight gradients to idle time; Atlas does not split its backwards.
    """
    stages = problem.placement.num_stages
    far = pace_s(problem) * problem.num_microbatches * (stages + 1)
    weight_s = far if put_off else -far * (stages + 2)
    wish_s = tuple((-far * stage, -far * (stages + 1), weight_s) for stage in range(stages))
    return Rule(wish_s=wish_s, pace_s=pace_s(problem), patience=0.0, queue=0.0, queue_gradients=True, pair=pair)


def critical_path(
    problem: Problem, *, pace: float, owed: float, patience: float, queue: float = inf, pair: Op | None = None
) -> Rule:
    """Earliest wish first: an action is wanted when a micro-batch that met no other would reach it.

    Args:
        pace: seconds from one micro-batch to the next, over those of the busiest rank or link.
        owed: how long a weight gradient may be put off, in the same unit.
        patience, queue, pair: see `Rule`.
    """
    step_s = pace_s(problem)
    forward_s, backward_s, end_s = lone_microbatch(problem)
    never_s = end_s + 4 * step_s * problem.num_microbatches
    wish_s = tuple(
        (ahead_s, back_s, min(back_s + cost.input_s + owed * step_s, never_s))
        for ahead_s, back_s, cost in zip(forward_s, backward_s, problem.costs.stages, strict=True)
    )
    return Rule(wish_s=wish_s, pace_s=pace * step_s, patience=patience, queue=queue, pair=pair)
