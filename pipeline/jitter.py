"""Jitter: durations of computations and transfers that are sampled around their medians, or were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import exp, inf, log, sqrt
from random import Random
from statistics import fmean, median

from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel, LinkCost

MOST_JITTER = 3.0
"""Largest jitter: one duration of three is then over twenty times its median, or under a twentieth."""


def sampled_s(costs: CostModel, action: Action, sample: int) -> float:
    """Return the seconds of a computation in a sample. The same arguments always give the same seconds.

    Durations are log-normal and independent, because causes such as other programs and clock rates only multiply them.
    """
    if action.op is Op.B:
        return sum(sampled_s(costs, action._replace(op=op), sample) for op in (Op.I, Op.W))
    cost = costs.stages[action.stage]
    return cost.seconds(action.op) * exp(cost.jitter * _normal(sample, action))


def sampled_factor(link: LinkCost, send: Action, sample: int) -> float:
    """Return the duration of a transfer in a sample, its latency included, as a multiple of the median."""
    return exp(link.jitter * _normal(sample, send)) if link.jitter else 1.0


@lru_cache(maxsize=1 << 18)
def _normal(sample: int, action: Action) -> float:
    """Return a number of the standard normal distribution."""
    return Random(f"{sample} {action}").gauss()


def has_jitter(costs: CostModel) -> bool:
    """True if the duration of any computation or transfer varies."""
    links = (costs.local, costs.wan, *(link for _, link in costs.wan_links))
    return any(stage.jitter for stage in costs.stages) or any(link.jitter for link in links)


def jitter_of(groups: Iterable[Sequence[float]]) -> float:
    """Return the jitter of measured durations, `MOST_JITTER` at most, or 0 without any.

    Args:
        groups: durations of one median each.
    """
    squares = []
    for group in groups:
        usual = median(group) if group else 0.0
        squares += [(log(value) - log(usual)) ** 2 for value in group if 0 < value < inf and 0 < usual < inf]
    return min(MOST_JITTER, sqrt(fmean(squares))) if squares else 0.0
