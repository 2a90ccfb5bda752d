"""The search: the best layouts by branch and bound, and how much better any other could be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.evaluation import Candidate, Evaluation
from weft.pipeline.planner.layout import Prediction, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import routes
from weft.pipeline.planner.shapes import shapes
from weft.pipeline.planner.workload import ModelWork

WORTH = 1.002
"""A layout is not looked at more closely if it can only be better by a five hundredth."""
MOST_ROUTES = {6: 64, 12: 16, 10**9: 6}
"""Orders of sites that are compared for one shape, by how many sites there are at most."""
EXPANDED = 5
"""Actions whose scheduling takes as long as the bound of a layout, a rank."""
EVERY = 16
"""Shapes after which a layout is scheduled, so that bounds have something to be held against early."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the search found.

    Attributes:
        ranked: predictions, best first: of each set of sites and each shape the best.
        gap: no layout of the space scores better than the best by more than this share.
        shapes: how many shapes were compared, and ``scheduled`` how many layouts were scheduled.
    """

    cluster: Cluster
    work: ModelWork
    request: Request
    ranked: tuple[Prediction, ...]
    gap: float
    shapes: int
    scheduled: int

    @property
    def alone(self) -> Prediction | None:
        """The best that stays in one site, if there is any."""
        return next((one for one in self.ranked if len(one.layout.sites) == 1), None)

    @property
    def best(self) -> Prediction:
        """The first of the ranking."""
        return self.ranked[0]


def plan(cluster: Cluster, work: ModelWork, request: Request) -> Plan:
    """Find the best layouts of a model on a cluster.

    A shape is all of a layout but its sites. Shapes are taken in the order of their lower bounds;
    a shape becomes its routes, orders of sites with Algorithm 1's stages at each, with bounds of
    their own; a route that comes first again is scheduled. The search ends where the next bound
    is no better than the best layout, or where the request's effort is spent: the remaining
    bounds then say by how much something else could be better.

    Raises:
        ValueError: no layout fits; the message says what binds.
    """
    evaluation = Evaluation(cluster, work, request)
    bounds = [(evaluation.shape_bound(shape), shape) for shape in shapes(cluster, work, request)]
    whole = [(bound, number, shape) for number, (bound, shape) in enumerate(bounds) if bound is not None]
    heapify(whole)
    found, left_out = _search(evaluation, cluster, request, list(whole))
    if not found:
        raise ValueError(evaluation.nothing_fits(len(whole)))
    scheduled = len(found)
    if request.max_sites != 1 and all(len(one.layout.sites) > 1 for one in found):  # whether the WAN pays at all
        alone, _ = _search(evaluation, cluster, replace(request, max_sites=1, effort=request.effort // 2), whole)
        found += sorted(alone, key=request.score)[:1]
    ranked = _distinct(sorted(found, key=request.score))
    return Plan(
        cluster=cluster,
        work=work,
        request=request,
        ranked=tuple(ranked),
        gap=max(0.0, 1 - left_out / request.score(ranked[0])),
        shapes=len(bounds) - sum(bound is None for bound, _ in bounds),
        scheduled=scheduled,
    )


def _search(
    evaluation: Evaluation, cluster: Cluster, request: Request, whole: list[tuple[float, int, Shape]]
) -> tuple[list[Prediction], float]:
    """What was scheduled, and the least bound of what was not.

    Args:
        whole: a heap of shapes by their bounds, each with a number of its own; it is used up.
    """
    order = count(len(whole))
    most = next(ways for sites, ways in MOST_ROUTES.items() if len(cluster.sites) <= sites)
    spent, left_out, best, expanded = 0, float("inf"), float("inf"), 0
    placed: list[tuple[float, int, Candidate]] = []
    found: list[Prediction] = []
    while whole or placed:
        bound = min(heap[0][0] for heap in (whole, placed) if heap)
        if bound * WORTH >= best or (spent >= request.effort and found):
            return found, min(left_out, bound)
        if whole and (not placed or whole[0][0] < placed[0][0]):
            bound, _, shape = heappop(whole)
            ways, complete = routes(cluster, shape, request, most=most)
            if not complete:
                left_out = min(left_out, bound)
            for route in ways:
                for candidate in evaluation.candidates(shape, route):
                    heappush(placed, (max(bound, candidate.score_bound), next(order), candidate))
                    spent += EXPANDED * candidate.layout.num_stages
            expanded += 1
            if expanded % EVERY:
                continue
        if placed and placed[0][0] < best:
            _, _, candidate = heappop(placed)
            spent += candidate.actions
            if (prediction := evaluation.schedule(candidate)) is not None:
                found.append(prediction)
                best = min(best, request.score(prediction))
    return found, left_out


def _distinct(ranked: list[Prediction]) -> list[Prediction]:
    """The best of those that differ in little."""
    seen: set[Any] = set()
    kept = []
    for one in ranked:
        layout = one.layout
        key = (
            frozenset(layout.sites),
            layout.num_stages,
            layout.replicas,
            layout.tensor,
            layout.context,
            layout.expert,
        )
        if key not in seen:
            seen.add(key)
            kept.append(one)
    return kept
