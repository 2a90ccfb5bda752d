"""Jitter: durations of computations that are sampled around their medians."""

from __future__ import annotations

from functools import lru_cache
from math import exp
from random import Random

from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel


def sampled_s(costs: CostModel, action: Action, sample: int) -> float:
    """Return the seconds of a computation in a sample. The same arguments always give the same seconds.

    Durations are log-normal and independent, because causes such as other programs and clock rates only multiply them.
    """
    if action.op is Op.B:
        return sum(sampled_s(costs, action._replace(op=op), sample) for op in (Op.I, Op.W))
    cost = costs.stages[action.stage]
    return cost.seconds(action.op) * exp(cost.jitter * _normal(sample, action))


@lru_cache(maxsize=1 << 18)
def _normal(sample: int, action: Action) -> float:
    """Return a number of the standard normal distribution."""
    return Random(f"{sample} {action}").gauss()


def has_jitter(costs: CostModel) -> bool:
    """True if the duration of any computation varies."""
    return any(stage.jitter for stage in costs.stages)
