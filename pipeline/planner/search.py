"""The search: the best layouts by branch and bound, and how much better any other could be."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import inf

from weft.pipeline.planner.branching import Search
from weft.pipeline.planner.candidates import Candidate
from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.routes import FEW_SITES, Route
from weft.pipeline.planner.shapes import MANY_REPLICAS, MOST_ROUTES, MOST_SEQUENCES, site_capacity
from weft.pipeline.planner.space import Space
from weft.pipeline.workload import ModelWork

DEEPENING = (1, 2)
"""Sites of a pipeline at first, where there are more than a few; a single site always comes first."""
SHARE_OF_FEW = 3
"""The additional effort for pipelines of few sites: one part in so many, for each number of sites."""
SHARE_OF_SEVERAL = 3
"""The additional effort for replicas at different sites: one part in so many."""
REPEATED = ("num_stages", "tensor", "context", "expert", "microbatch_size")
"""Fields of a layout that stay if its pipelines are repeated at other sites."""
RANKED = 6
"""Minimum number of ranked layouts, if there are as many different ones."""
SHARE_OF_PRICES = 4
"""The additional effort for the fastest layout of each price: one part in so many."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of the search.

    Attributes:
        ranked: predictions, best first: the best of each set of sites and each shape.
        gap: upper bound, as a share, of the improvement that any layout of the space could bring: how much faster it
            could be, or how much dearer the best is.
        shapes: number of compared shapes. Folds within sites and over them count as one shape. A shape counts if it
            had a lower bound of its own or shared one with similar shapes.
        scheduled: number of layouts that were scheduled.
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
        """The best prediction within one site, or None."""
        return next((one for one in self.ranked if len(one.layout.sites) == 1), None)

    @property
    def best(self) -> Prediction:
        """The first prediction of the ranking."""
        return self.ranked[0]

    def again(self, cluster: Cluster) -> Plan:
        """Plan for a changed cluster, on which the ranked layouts are compared, too.

        Raises:
            ValueError: no layout fits.
        """
        return plan(cluster, self.work, self.request, [one.layout for one in self.ranked])

    @property
    def left_out(self) -> list[str]:
        """The kinds of layouts that ``gap`` does not cover, besides those that the request excludes."""
        found = ["DP-cells with tensor, context or expert parallelism"]
        sites = len(self.cluster.sites)
        pins = self.request.pins
        if sites > FEW_SITES and pins.get("routes", 2) > 1:
            found.append("replicas on routes of their own that go through several sites")
        if not self.request.sequences and "microbatch_size" not in pins:
            found.append(f"micro-batches of more than {MOST_SEQUENCES} sequences")
        if not self.request.sequences and "replicas" not in pins:
            found.append(f"most numbers of replicas above {MANY_REPLICAS}")
        if not self.work.heads and "tensor" not in pins:
            found.append("tensor parallelism over hosts in other degrees than powers of two, as the heads are unknown")
        return found


def plan(cluster: Cluster, work: ModelWork, request: Request, known: Iterable[Layout] = ()) -> Plan:
    """Find the best layouts of a model on a cluster.

    The space has every value that a pin may have, except `Plan.left_out`. A shape is a layout without its sites and its
    cut. A family is a set of shapes that differ only in stages, ZeRO and placement. The search divides the space into
    degrees, families, shapes, routes through sites, and cuts; each part has a lower bound. See `Search`. Pipelines of
    few sites are searched first, and replicas at different sites last.

    Args:
        known: layouts of a similar cluster, to compare first, so that a better cluster has no worse plan.

    Raises:
        ValueError: no layout fits, or none is found within `WITHOUT_PLAN`; the message names the binding constraint.
    """
    space = Space(cluster, work, request)
    found = _scheduled(space, known)
    found += _fastest_by_price(cluster, work, request) if request.objective is Objective.cost else []
    narrow = Space(cluster, work, request, is_narrow=True, evaluation=space.evaluation)
    spare: list[tuple[float, Candidate]] = []
    scheduled, left_out = len(found), inf
    for part, pass_request, routes in _passes(space, narrow, request):
        if routes.start > 1:
            repeated = _repeated(space, request, found)
            found, scheduled = found + repeated, scheduled + len(repeated)
        best = min(map(request.score, found), default=inf)
        is_last = part is space
        more, left, others = Search(part, pass_request, routes, best, is_last=is_last).run()
        found += more if is_last else request.ranked(more)[:1]
        scheduled += len(more)
        if is_last:
            left_out, spare = min(left_out, left), spare + others
    if not found:
        reason = space.evaluation.refused.explained()
        if left_out < inf:
            reason = f"no plan found, and the search ended before it had compared all layouts; most often: {reason}"
        raise ValueError(reason)
    ranked = _with_more(space, _distinct(request.ranked(found)), spare)
    best = request.score(ranked[0])
    return Plan(
        cluster=cluster,
        work=work,
        request=request,
        ranked=tuple(ranked),
        gap=max(0.0, best / left_out - 1) if left_out else inf,
        shapes=space.shapes,
        scheduled=scheduled,
    )


def _passes(space: Space, narrow: Space, request: Request) -> Iterator[tuple[Space, Request, range]]:
    """Yield the passes of the search in order: the space, the request with its effort, and the numbers of routes."""
    for max_sites in _deepening(len(space.cluster.sites), request.max_sites):
        is_last = max_sites == request.max_sites
        effort = request.effort if is_last else request.effort // SHARE_OF_FEW
        yield space if is_last else narrow, replace(request, max_sites=max_sites, effort=effort), range(1, 2)
    if len(space.cluster.sites) > 1:
        effort, max_sites = request.effort // SHARE_OF_SEVERAL, space.evaluation.sites_of_several()
        yield space, replace(request, max_sites=max_sites, effort=effort), range(2, MOST_ROUTES + 1)


def _scheduled(space: Space, layouts: Iterable[Layout]) -> list[Prediction]:
    """Return the predictions of the layouts for which the cluster has the GPUs."""
    found: list[Prediction] = []
    for layout in layouts:
        shape = Shape(**{field.name: getattr(layout, field.name) for field in fields(Shape)})
        route = Route(layout.sites, layout.stages)
        caps = site_capacity(space.cluster, shape.gpus_per_rank, shape.replicas_of_route)
        if all(count <= caps[site] for site, count in zip(route.sites, route.stages, strict=True)):
            candidates = space.evaluation.candidates(shape, route, [layout.layers])
            alike = (one for one in candidates if replace(one.layout, connections=layout.connections) == layout)
            found += [one for one in map(space.evaluation.schedule, alike) if one is not None]
    return found


def _repeated(space: Space, request: Request, found: list[Prediction]) -> list[Prediction]:
    """Return the best layouts whose pipelines stay in one site each, and have sites of their own.

    Their stages and degrees are those of the best layout so far, or free. Of all layouts with several routes these are
    few, and would be tried late, since many have lower bounds.
    """
    best = {name: getattr(request.ranked(found)[0].layout, name) for name in REPEATED} if found else {}
    more: list[Prediction] = []
    for alike in [best, {}] if best else [{}]:
        one = replace(request, pins={**alike, **request.pins}, max_sites=1, effort=request.effort // SHARE_OF_SEVERAL)
        part = Space(space.cluster, space.work, one, is_narrow=True)
        score = min(map(request.score, found + more), default=inf)
        more += request.ranked(Search(part, one, range(2, MOST_ROUTES + 1), score, is_last=False).run().predictions)[:1]
    return more


def _with_more(space: Space, ranked: list[Prediction], spare: list[tuple[float, Candidate]]) -> list[Prediction]:
    """Return the ranking with further, distinct layouts added in the order of their bounds."""
    seen = {_likeness(one.layout) for one in ranked}
    for _, candidate in sorted(spare, key=lambda one: one[0]):
        if len(seen) >= RANKED:
            break
        if _likeness(candidate.layout) not in seen and (one := space.evaluation.schedule(candidate)) is not None:
            seen.add(_likeness(candidate.layout))
            ranked.append(one)
    return space.request.ranked(ranked)


def _fastest_by_price(cluster: Cluster, work: ModelWork, request: Request) -> list[Prediction]:
    """Return the fastest layouts in one site of each kind, with all its hosts, half of them, a quarter, and so on.

    The cheapest plan is the fastest one at its price. Bounds on cost hardly differ, because the same work costs the
    same on any number of GPUs, so a search by cost finds a cheap plan late. A search by step time finds fast plans
    soon.
    """
    found: list[Prediction] = []
    effort = request.effort // SHARE_OF_PRICES
    sites = cluster.sites
    by_price = sorted(range(len(sites)), key=lambda one: -sites[one].price)
    cheapest = {(sites[one].gpu.name, sites[one].gpus_per_host): one for one in by_price if sites[one].gpus}
    evaluation = Evaluation(cluster, work, request)
    bounds = {kind: evaluation.alone_bound(number) for kind, number in cheapest.items()}
    for kind in sorted(cheapest, key=lambda kind: bounds[kind]):
        hosts = sites[cheapest[kind]].hosts
        while hosts and bounds[kind] < min(map(request.score, found), default=inf):
            left = {cheapest[kind]: hosts}
            alone = replace(cluster, sites=tuple(replace(site, hosts=left.get(at, 0)) for at, site in enumerate(sites)))
            fast = replace(request, objective=Objective.throughput, max_sites=1, effort=effort)
            more = Search(Space(alone, work, fast, is_narrow=True), fast, range(1, 2), is_last=False).run().predictions
            found += request.ranked(more)[:1]
            hosts //= 2
    return found


def _deepening(num_sites: int, max_sites: int) -> list[int]:
    """Return the maximum numbers of sites of a pipeline for successive searches; 0 is no limit.

    Few sites are searched quickly, and their result prunes much of the search for more.
    """
    first = [sites for sites in DEEPENING if num_sites > FEW_SITES or sites == 1]
    return [sites for sites in first if not max_sites or sites < max_sites] + [max_sites]


def _distinct(ranked: list[Prediction]) -> list[Prediction]:
    """Return the best prediction of each group of similar layouts."""
    kept: dict[Hashable, Prediction] = {}
    for one in ranked:
        kept.setdefault(_likeness(one.layout), one)
    return list(kept.values())


def _likeness(layout: Layout) -> Hashable:
    """Return the properties that similar layouts have in common."""
    degrees = layout.num_stages, layout.replicas, layout.tensor, layout.context, layout.expert, layout.arrangement
    return frozenset(layout.sites), layout.routes, *degrees
