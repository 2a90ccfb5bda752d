"""The search: the best layouts by branch and bound, and how much better any other could be."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, merge
from itertools import count

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.evaluation import Candidate, Evaluation
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import FEW_SITES, Route, Routes
from weft.pipeline.planner.shapes import shapes
from weft.pipeline.planner.workload import ModelWork

WORTH = 1.002
"""A layout is not looked at more closely if it can only be better by a five hundredth."""
DEEPENING = (1, 2, 4)
"""Sites of a pipeline at first, where there are more than a few; a single site always comes first."""
SHARE_OF_SEVERAL = 3
"""Of the effort, what goes into replicas at different sites: one part in so many, besides."""
RANKED = 8
"""Layouts that are ranked at least, if there are as many that differ."""
BOUNDED = 3
"""Actions whose scheduling takes as long as the bound of a route."""
EXPANDED = 5
"""Actions whose scheduling takes as long as the bound of a layout, a rank."""
EVERY = 2000
"""Effort after which a layout is scheduled, so that bounds have something to be held against early."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the search found.

    Attributes:
        ranked: predictions, best first: of each set of sites and each shape the best.
        gap: no layout of the space scores better than the best by more than this share.
        shapes: how many shapes were compared, where folds within sites and over them are one, and ``scheduled`` how
            many layouts were scheduled.
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
    a shape becomes routes through sites, with Algorithm 1's stages at each and bounds of their own.
    The route whose bound comes first grows by a site, or is scheduled once it is whole. The search
    ends where the next bound is no better than the best layout, or where the request's effort is
    spent: the remaining bounds then say by how much something else could be better. It goes
    through pipelines of few sites first, and through those of replicas at different sites last.

    Raises:
        ValueError: no layout fits; the message says what binds.
    """
    evaluation, scheduled = Evaluation(cluster, work, request), 0
    every = list(shapes(cluster, work, request))
    whole = _bounded(evaluation, [shape for shape in every if shape.routes == 1])
    found: list[Prediction] = []
    left_out = best = float("inf")
    for max_sites in _deepening(len(cluster.sites), request.max_sites):
        pass_request = replace(request, max_sites=max_sites)
        more, left_out, spare = _search(evaluation, cluster, pass_request, whole, best)
        found += more if max_sites != 1 else sorted(more, key=request.score)[:1]
        scheduled += len(more)
        best = min(map(request.score, found), default=best)
    several = [shape for shape in every if shape.routes > 1]
    several = [shape for shape in several if not found or evaluation.across_bound(shape) * WORTH < best]
    if several:
        apart = _bounded(evaluation, several)
        effort = request.effort // SHARE_OF_SEVERAL
        pass_request = replace(request, max_sites=evaluation.sites_of_several(), effort=effort)
        more, left, others = _search(evaluation, cluster, pass_request, apart, best)
        found, scheduled, left_out = found + more, scheduled + len(more), min(left_out, left)
        spare = list(merge(sorted(spare), sorted(others)))
    if not found:
        raise ValueError(evaluation.refused.explained())
    ranked = _distinct(sorted(found, key=request.score))
    seen = {_likeness(one.layout) for one in ranked}
    while spare and len(seen) < RANKED:
        candidate = heappop(spare)[2]
        if _likeness(candidate.layout) not in seen and (one := evaluation.schedule(candidate)) is not None:
            seen.add(_likeness(candidate.layout))
            ranked.append(one)
    ranked.sort(key=request.score)
    return Plan(
        cluster=cluster,
        work=work,
        request=request,
        ranked=tuple(ranked),
        gap=max(0.0, 1 - left_out / request.score(ranked[0])),
        shapes=len(whole) + sum(shape.routes > 1 for shape in every),
        scheduled=scheduled,
    )


def _bounded(evaluation: Evaluation, every: list[Shape]) -> list[tuple[float, int, Shape]]:
    """Shapes that fit somewhere by their bounds, each with a number of its own."""
    bounds = [(evaluation.shape_bound(shape), shape) for shape in every]
    return [(bound, number, shape) for number, (bound, shape) in enumerate(bounds) if bound is not None]


def _deepening(num_sites: int, max_sites: int) -> list[int]:
    """Sites that pipelines may go through, search by search; 0 is no limit.

    Few sites are searched through soon, and what they take ends much of the search for more.
    """
    first = [sites for sites in DEEPENING if num_sites > FEW_SITES or sites == 1]
    return [sites for sites in first if not max_sites or sites < max_sites] + [max_sites]


def _search(
    evaluation: Evaluation,
    cluster: Cluster,
    request: Request,
    whole: list[tuple[float, int, Shape]],
    best: float = float("inf"),
) -> tuple[list[Prediction], float, list[tuple[float, int, Candidate]]]:
    """What was scheduled, the least bound of what was not, and a heap of whole layouts by their bounds.

    Args:
        whole: shapes by their bounds, each with a number of its own.
        best: score of what is found already.
    """
    order = count(len(whole))
    ways = Routes(cluster, request)
    opened: list[tuple[float, int, int, Shape, Route | None]] = [
        (bound, 0, one, shape, None) for bound, one, shape in whole
    ]
    heapify(opened)
    placed: list[tuple[float, int, Candidate]] = []
    found: list[Prediction] = []
    spent, due, left_out = 0, EVERY, float("inf")
    while opened or placed:
        bound = min(heap[0][0] for heap in (opened, placed) if heap)
        if bound * WORTH >= best or (spent >= request.effort and best < float("inf")):
            return found, min(bound, left_out), placed
        if opened and (not placed or (opened[0][0] < placed[0][0] and spent < due)):
            bound, depth, _, shape, route = heappop(opened)
            if route is None and (twin := ways.fold_over_sites(shape)):
                heappush(opened, (max(bound, evaluation.shape_bound(twin) or bound), 0, next(order), twin, None))
            for further in ways.longer(shape, route):
                spent += BOUNDED
                if (least := evaluation.route_bound(shape, further, request.max_sites)) is None:
                    continue
                least = max(bound, least)
                if least * WORTH >= best:
                    left_out = min(left_out, least)
                elif not further.is_whole(shape):
                    heappush(opened, (least, depth - 1, next(order), shape, further))
                else:
                    for candidate in evaluation.candidates(shape, further):
                        heappush(placed, (max(least, candidate.score_bound), next(order), candidate))
                        spent += EXPANDED * candidate.layout.virtual_stages
            continue
        due = spent + EVERY
        if placed[0][0] < best:
            _, _, candidate = heappop(placed)
            spent += candidate.actions
            if (prediction := evaluation.schedule(candidate)) is not None:
                found.append(prediction)
                best = min(best, request.score(prediction))
    return found, left_out, placed


def _distinct(ranked: list[Prediction]) -> list[Prediction]:
    """The best of those that differ in little."""
    kept: dict[Hashable, Prediction] = {}
    for one in ranked:
        kept.setdefault(_likeness(one.layout), one)
    return list(kept.values())


def _likeness(layout: Layout) -> Hashable:
    """What layouts have in common that differ in little."""
    degrees = layout.num_stages, layout.replicas, layout.tensor, layout.context, layout.expert, layout.arrangement
    return frozenset(layout.sites), layout.routes, *degrees
