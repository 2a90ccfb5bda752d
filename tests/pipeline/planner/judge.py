"""A judgement of plans for random clusters, by all layouts of each; `python -m benchmarks planner` counts them."""

from dataclasses import dataclass
from math import inf

from tests.pipeline.planner.brute_force import BruteForce
from tests.pipeline.planner.own_model import ROUNDING
from weft.pipeline.planner.request import Objective
from weft.pipeline.planner.search import plan

TOLERANCE = 1e-6
"""Relative error of scores; larger differences count."""


@dataclass
class Verdict:
    """The result of the brute force for one plan.

    Attributes:
        found: the plan; None if the planner finds none, with an infinite ``score``.
        best: the layout that scores least of those that score less than the plan's claim, with its score.
        cheaper: a layout as fast as the best plan at a lower price per hour, if there is one.
    """

    found: object
    score: float
    best: object
    cheaper: object
    layouts: int
    simulated: int


def judge(cluster, work, request):
    """Plan, and look for layouts that refute what the plan claims."""
    brute = BruteForce(cluster, work, request)
    try:
        found = plan(cluster, work, request)
        score, price = brute.own.score(found.best.layout, found.best.step_s), found.best.price_per_hour
        proven = score / (1 + found.gap) * (1 - TOLERANCE)
    except ValueError:
        found, score, proven, price = None, inf, inf, 0.0
    money = request.objective is Objective.cost

    def limit_of(an_hour):
        return score * ROUNDING if an_hour < price / ROUNDING and not money else proven

    others = sorted(brute.better(limit_of), key=lambda one: one[1])
    best = next(((layout, one) for layout, one in others if one < proven), None)
    cheaper = next(((layout, one) for layout, one in others if one >= proven), None)
    return Verdict(found, score, best, cheaper, brute.layouts, brute.simulated)
