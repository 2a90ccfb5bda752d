"""The search: the best layouts by branch and bound, and how much better any other could be."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, merge
from itertools import count
from typing import NamedTuple

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.evaluation import Candidate, Evaluation
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.request import Objective, Request
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
SHARE_OF_PRICES = 12
"""Of the effort, what goes into the fastest layout of each price: one part in so many, for each, besides."""
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


class _Opened(NamedTuple):
    """A shape whose route is still to be found, or to be continued.

    Attributes:
        expected: score by which the search goes; ``bound`` is what it scores at least.
        crowding: by how much they differ; None while nobody has looked.
    """

    expected: float
    bound: float
    depth: int
    number: int
    shape: Shape
    route: Route | None = None
    crowding: float | None = None


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
    evaluation = Evaluation(cluster, work, request)
    every = list(shapes(cluster, work, request))
    whole = _bounded(evaluation, [shape for shape in every if shape.routes == 1])
    found = _fastest_by_price(cluster, work, request, every) if request.objective is Objective.cost else []
    scheduled, left_out = len(found), float("inf")
    best = min(map(request.score, found), default=float("inf"))
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


def _fastest_by_price(cluster: Cluster, work: ModelWork, request: Request, every: list[Shape]) -> list[Prediction]:
    """The fastest layout in one site of each kind for as much as there is an hour, for half of that, and so on.

    The cheapest plan is the fastest of its price. Bounds of costs hardly differ, since the same work costs the same on
    any number of GPUs, and lead to a cheap plan late; those of steps lead to fast ones soon.
    """
    found: list[Prediction] = []
    effort = request.effort // SHARE_OF_PRICES
    by_price = sorted(cluster.sites, key=lambda site: -site.price)
    cheapest = {(site.gpu.name, site.gpus_per_host): site for site in by_price if site.gpus}
    for site in cheapest.values():
        alone = replace(cluster, sites=tuple(one if one is site else replace(one, hosts=0) for one in cluster.sites))
        fast = replace(request, objective=Objective.throughput, max_sites=1, effort=effort)
        evaluation = Evaluation(alone, work, fast)
        gpus = site.gpus
        while gpus:
            here = [shape for shape in every if shape.routes == 1 and gpus / 2 < shape.gpus <= gpus]
            more, _, _ = _search(evaluation, alone, fast, _bounded(evaluation, here))
            found += [min(more, key=request.score)] if more else []
            gpus //= 2
    return found


def _bounded(evaluation: Evaluation, every: list[Shape]) -> list[tuple[float, Shape]]:
    """Shapes that fit somewhere, with their bounds."""
    bounds = ((evaluation.shape_bound(shape), shape) for shape in every)
    return [(bound, shape) for bound, shape in bounds if bound is not None]


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
    whole: list[tuple[float, Shape]],
    best: float = float("inf"),
) -> tuple[list[Prediction], float, list[tuple[float, int, Candidate]]]:
    """What was scheduled, the least bound of what was not, and a heap of whole layouts by their bounds.

    Args:
        whole: shapes with their bounds.
        best: score of what is found already.
    """
    order = count()
    ways = Routes(cluster, request)
    opened = [_Opened(bound, bound, 0, next(order), shape) for bound, shape in whole]
    heapify(opened)
    placed: list[tuple[float, int, Candidate]] = []
    found: list[Prediction] = []
    spent, due, left_out = 0, EVERY, float("inf")
    while spent < request.effort or best == float("inf"):
        while opened and opened[0].bound * WORTH >= best:
            left_out = min(left_out, heappop(opened).bound)
        worth = bool(placed) and placed[0][0] * WORTH < best
        if not opened and not worth:
            break
        if not opened or (worth and (opened[0].expected >= placed[0][0] or spent >= due)):
            due = spent + EVERY
            _, _, candidate = heappop(placed)
            spent += candidate.actions
            if (prediction := evaluation.schedule(candidate)) is not None:
                found.append(prediction)
                best = min(best, request.score(prediction))
            continue
        one = heappop(opened)
        if one.crowding is None:
            crowding = evaluation.crowding(one.shape)
            heappush(opened, one._replace(expected=one.bound * crowding, crowding=crowding))
            continue
        if one.route is None and (twin := ways.fold_over_sites(one.shape)):
            bound = max(one.bound, evaluation.shape_bound(twin) or one.bound)
            heappush(opened, _Opened(bound, bound, 0, next(order), twin))
        for further in ways.longer(one.shape, one.route):
            spent += BOUNDED
            if (least := evaluation.route_bound(one.shape, further, request.max_sites)) is None:
                continue
            least = max(one.bound, least)
            if least * WORTH >= best:
                left_out = min(left_out, least)
            elif not further.is_whole(one.shape):
                expected = least * one.crowding
                heappush(
                    opened,
                    one._replace(
                        expected=expected, bound=least, depth=one.depth - 1, number=next(order), route=further
                    ),
                )
            else:
                for candidate in evaluation.candidates(one.shape, further):
                    heappush(placed, (max(least, candidate.score_bound), next(order), candidate))
                    spent += EXPANDED * candidate.layout.virtual_stages
    left_out = min([left_out, *(one.bound for one in opened), *(bound for bound, _, _ in placed[:1])])
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
