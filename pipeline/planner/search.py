"""The search: the best layouts by branch and bound, and how much better any other could be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush, merge
from itertools import count, islice
from math import inf
from typing import NamedTuple

from weft.pipeline.planner.bounds import ANYWHERE
from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.evaluation import Candidate, Evaluation
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.routes import FEW_SITES, Route, Routes
from weft.pipeline.planner.shapes import MOST_ROUTES, Degrees, all_degrees, arranged, families, members, stage_counts
from weft.pipeline.planner.workload import ModelWork

WORTH = 1.002
"""At first a layout is not looked at more closely if it can only be better by a five hundredth."""
DEEPENING = (1, 2)
"""Sites of a pipeline at first, where there are more than a few; a single site always comes first."""
SHARE_OF_FEW = 3
"""Of the effort, what goes into pipelines of few sites: one part in so many, for each number of sites, besides."""
SHARE_OF_SEVERAL = 3
"""Of the effort, what goes into replicas at different sites: one part in so many, besides."""
RANKED = 8
"""Layouts that are ranked at least, if there are as many that differ."""
SHARE_OF_PRICES = 6
"""Of the effort, what goes into the fastest layout of each price: one part in so many, for each, besides."""
BOUNDED = 8
"""Actions whose scheduling takes as long as the bound of a route."""
EXPANDED = 5
"""Actions whose scheduling takes as long as the bound of a layout, a rank."""
EVERY = 5000
"""Effort after which a layout is scheduled, so that bounds have something to be held against early."""
OF_MANY, WITHOUT_ROUTE, ON_THE_WAY = 1.04, 1.02, 1.01
"""How many times its bound the best of a family is expected to score, of a shape, and of a route that goes on."""
MANY_ACTIONS = 1e6
"""Actions for which another layout is scheduled first that may be half as good."""
LATER = 1.02
"""How much more is expected of further cuts of a route with every few of them."""
USUAL_SIZE = 8
"""Sequences of a micro-batch, at most, where good plans are looked for first."""
TOGETHER = 8
"""Cuts of a route that are looked at together, after those whose slowest rank is the fastest."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the search found.

    Attributes:
        ranked: predictions, best first: of each set of sites and each shape the best.
        gap: no layout of the space scores better than the best by more than this share.
        shapes: how many shapes were compared, where folds within sites and over them are one, by a bound of their own
            or one for many that are alike; ``scheduled`` is how many layouts were scheduled.
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
    """A part of the space that is still to be looked at.

    Attributes:
        expected: score by which the search goes; ``bound`` is what it scores at least.
        shape: of a family, with any of the numbers of stages that are left (``counts``), or all but its route.
        crowding: by how much ``expected`` and ``bound`` differ; None while that is not known.
        cuts: further cuts of a whole route.
    """

    expected: float
    bound: float
    depth: int
    number: int
    shape: Shape
    counts: tuple[int, ...] = ()
    route: Route = ANYWHERE
    crowding: float | None = None
    cuts: Iterator[tuple[int, ...]] | None = None


class _Found(NamedTuple):
    """What a search found: predictions, the least bound of what it left, and whole layouts by their bounds."""

    predictions: list[Prediction]
    left_out: float
    spare: list[tuple[float, int, Candidate]]


def plan(cluster: Cluster, work: ModelWork, request: Request) -> Plan:
    """Find the best layouts of a model on a cluster.

    The space has every value that a pin may have. A family is what shapes have in common that differ in stages, ZeRO
    and placement; a shape is all of a layout but its sites and its cut. Families, shapes, routes through sites and
    cuts are parts of one another with lower bounds, and the part whose bound comes first is taken apart, or
    scheduled once it is a whole layout. The search ends where the next bound is no better than the best layout, or
    where the request's effort is spent: the remaining bounds then say by how much something else could be better. It
    goes through pipelines of few sites first, and through those of replicas at different sites last.

    Raises:
        ValueError: no layout fits; the message says what binds.
    """
    space = _Space(cluster, work, request)
    evaluation = space.evaluation
    found = _fastest_by_price(cluster, work, request) if request.objective is Objective.cost else []
    spare: list[tuple[float, int, Candidate]] = []
    scheduled, left_out = len(found), inf
    best = min(map(request.score, found), default=inf)
    narrow = _Space(cluster, work, request, is_narrow=True)
    for max_sites in _deepening(len(cluster.sites), request.max_sites):
        effort = request.effort // SHARE_OF_FEW if max_sites != request.max_sites else request.effort
        pass_request = replace(request, max_sites=max_sites, effort=effort)
        part = space if max_sites == request.max_sites else narrow
        more, left_out, spare = _search(part, pass_request, [1], best)
        found += more if max_sites != 1 else sorted(more, key=request.score)[:1]
        scheduled += len(more)
        best = min(map(request.score, found), default=best)
    several = list(range(2, min(len(cluster.sites), MOST_ROUTES) + 1))
    if several:
        effort = request.effort // SHARE_OF_SEVERAL
        pass_request = replace(request, max_sites=evaluation.sites_of_several(), effort=effort)
        more, left, others = _search(space, pass_request, several, best)
        found, scheduled, left_out = found + more, scheduled + len(more), min(left_out, left)
        spare = list(merge(spare, others))
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
        shapes=space.shapes,
        scheduled=scheduled,
    )


class _Space:
    """The space of a request: families by their degrees of parallelism, with bounds that are computed once.

    Args:
        is_narrow: leave out what is rarely best, to find good plans soon.
    """

    def __init__(self, cluster: Cluster, work: ModelWork, request: Request, *, is_narrow: bool = False) -> None:
        self.cluster, self.work, self.request, self.is_narrow = cluster, work, request, is_narrow
        self.evaluation = Evaluation(cluster, work, request)
        self.shapes = 0
        every = list(all_degrees(cluster, work, request))
        if is_narrow:
            least = min(one.context for one in every) if every else 1
            every = [one for one in every if one.context == least]
        self.degrees = [(self.evaluation.degrees_bound(one), one) for one in every]
        self._families: dict[Degrees, list[tuple[float, Shape, tuple[int, ...]]]] = {}

    def families(self, degrees: Degrees) -> list[tuple[float, Shape, tuple[int, ...]]]:
        """The families of these degrees with bounds and numbers of stages: those in one site, and those in several."""
        if degrees not in self._families:
            self._families[degrees] = found = []
            for family in families(self.cluster, self.work, self.request, degrees):
                if self.is_narrow and family.microbatch_size > USUAL_SIZE:
                    continue
                counts = stage_counts(self.cluster, self.work, self.request, family)
                if self.is_narrow and len(counts) > 1:
                    layers = len(self.work.layers)
                    counts = [stages for stages in counts if -(-layers // -(-layers // stages)) == stages]
                placed = sum(1 + 3 * (1 < stages <= len(self.work.layers) // 2) for stages in counts)
                self.shapes += placed * len(list(members(self.request, family, 1)))
                most = self.evaluation.most_stages(family)
                split = bisect_right(counts, most)
                for some in (counts[:split], counts[split:]):
                    if some and (bound := self.evaluation.family_bound(family, some[-1])) < inf:
                        found.append((bound, family, tuple(some)))
        return self._families[degrees]

    def members(self, family: Shape, stages: int) -> Iterator[tuple[float, Shape]]:
        """The shapes of a family with so many stages, and their bounds."""
        for shape in members(self.request, family, stages):
            if (bound := self.evaluation.shape_bound(shape)) is not None:
                yield bound, shape

    def arranged(self, shape: Shape, route: Route, bound: float) -> Iterator[tuple[float, Shape]]:
        """A shape on a whole route with each placement, and bounds; in one site both folds are one."""
        pinned = "arrangement" in self.request.pins
        for one in arranged(self.work, self.request, shape):
            if one.crossings == 1 or pinned:
                yield bound, one
            elif len(route.sites) > shape.routes and (least := self.evaluation.route_bound(one, route)) is not None:
                yield max(bound, least), one


def _fastest_by_price(cluster: Cluster, work: ModelWork, request: Request) -> list[Prediction]:
    """The fastest layout in one site of each kind for as much as there is an hour, for half of that, and so on.

    The cheapest plan is the fastest of its price. Bounds of costs hardly differ, since the same work costs the same on
    any number of GPUs, and lead to a cheap plan late; those of steps lead to fast ones soon.
    """
    found: list[Prediction] = []
    effort = request.effort // SHARE_OF_PRICES
    by_price = sorted(cluster.sites, key=lambda site: -site.price)
    cheapest = {(site.gpu.name, site.gpus_per_host): site for site in by_price if site.gpus}
    for site in cheapest.values():
        gpus = site.gpus
        while gpus:
            hosts = max(1, gpus // site.gpus_per_host)
            small = replace(site, hosts=hosts, gpus_per_host=min(gpus, site.gpus_per_host))
            sites = tuple(small if one is site else replace(one, hosts=0) for one in cluster.sites)
            alone = replace(cluster, sites=sites)
            fast = replace(request, objective=Objective.throughput, max_sites=1, effort=effort)
            more = _search(_Space(alone, work, fast, is_narrow=True), fast, [1]).predictions
            found += [min(more, key=request.score)] if more else []
            gpus //= 2
    return found


def _deepening(num_sites: int, max_sites: int) -> list[int]:
    """Sites that pipelines may go through, search by search; 0 is no limit.

    Few sites are searched through soon, and what they take ends much of the search for more.
    """
    first = [sites for sites in DEEPENING if num_sites > FEW_SITES or sites == 1]
    return [sites for sites in first if not max_sites or sites < max_sites] + [max_sites]


def _search(space: _Space, request: Request, routes: Sequence[int], best: float = inf) -> _Found:
    """Search the families with so many routes for what is better than the ``best`` score."""
    return _Search(space, request, routes, best).run()


_SHAPE = tuple(field.name for field in fields(Shape))


def _place_of(layout: Layout) -> tuple[Shape, Route]:
    """All of a layout but its cut, its schedule and its DP-cells."""
    return Shape(**{name: getattr(layout, name) for name in _SHAPE}), Route(layout.sites, layout.stages)


class _Search:
    """One pass of branch and bound."""

    def __init__(self, space: _Space, request: Request, routes: Sequence[int], best: float) -> None:
        self._space, self._request, self._wanted, self._best = space, request, routes, best
        self._evaluation, self._ways = space.evaluation, Routes(space.cluster, request)
        self._order, self._spent, self._left_out = count(), 0, inf
        self._opened: list[_Opened] = []
        self._placed: list[tuple[float, int, Candidate, float]] = []
        self._found: list[Prediction] = []
        self._tried: set[Layout] = set()
        self._reached: dict[tuple[Shape, Route], float] = {}
        self._degrees = sorted(space.degrees, reverse=True)

    def run(self) -> _Found:
        """Take apart what may be better, until nothing is left or the effort is spent."""
        due, opened, placed = EVERY, self._opened, self._placed
        spare: list[tuple[float, int, Candidate]] = []
        while self._spent < self._request.effort or self._best == inf:
            self._open_degrees()
            while opened and opened[0].bound * WORTH >= self._best:
                self._leave(heappop(opened).bound)
            while placed and placed[0][3] * WORTH >= self._best:
                _, number, candidate, bound = heappop(placed)
                spare.append((bound, number, candidate))
            worth = bool(placed)
            if not opened and not worth:
                if not self._degrees or self._degrees[-1][0] * WORTH >= self._best:
                    break
                continue
            if not opened or (worth and (opened[0].expected >= placed[0][0] or self._spent >= due)):
                self._schedule()
                due = self._spent + EVERY
            else:
                self._take_apart(heappop(opened))
        spare += [(bound, number, candidate) for _, number, candidate, bound in placed]
        left = [*(one.bound for one in opened), *(bound for bound, _, _ in spare), *(one for one, _ in self._degrees)]
        return _Found(self._found, min([self._left_out, *left]), sorted(spare, key=lambda one: one[:2]))

    def _leave(self, bound: float) -> None:
        self._left_out = min(self._left_out, bound)

    def _open(self, one: _Opened) -> None:
        if one.bound * WORTH >= self._best:
            self._leave(one.bound)
        else:
            heappush(self._opened, one._replace(number=next(self._order)))

    def _open_degrees(self) -> None:
        """Open the families of the next degrees, if these may come next."""
        while self._degrees and self._degrees[-1][0] * WORTH < self._best:
            if self._opened and self._opened[0].expected < self._degrees[-1][0]:
                return
            for bound, family, counts in self._space.families(self._degrees.pop()[1]):
                alone = self._request.max_sites == 1
                if family.routes in self._wanted and not (alone and counts[0] > self._evaluation.most_stages(family)):
                    self._open(_Opened(bound * OF_MANY, bound, 0, 0, family, counts))

    def _schedule(self) -> None:
        expected, number, candidate, bound = heappop(self._placed)
        key = _place_of(candidate.layout)
        if (known := self._reached.get(key, 0.0)) > expected:  # as others did that differ in their cut
            heappush(self._placed, (known, number, candidate, bound))
            return
        self._spent += candidate.actions
        if (prediction := self._evaluation.schedule(candidate)) is not None:
            self._found.append(prediction)
            score = self._request.score(prediction)
            self._reached[key] = min(self._reached.get(key, inf), score)
            self._best = min(self._best, self._request.score(prediction))

    def _take_apart(self, one: _Opened) -> None:
        if one.counts:
            *rest, stages = one.counts
            if rest:
                bound = self._evaluation.family_bound(one.shape, rest[-1])
                self._open(one._replace(expected=bound * OF_MANY, bound=bound, counts=tuple(rest)))
            for bound, shape in self._space.members(one.shape, stages):
                self._spent += BOUNDED
                bound = max(bound, one.bound)
                self._open(_Opened(bound * WITHOUT_ROUTE, bound, 0, 0, shape))
        elif one.cuts is not None:
            self._cut_further(one)
        elif one.crowding is None:
            crowding = self._evaluation.crowding(one.shape)
            self._open(one._replace(expected=one.bound * crowding * WITHOUT_ROUTE, crowding=crowding))
        else:
            self._go_on(one)

    def _go_on(self, one: _Opened) -> None:
        """Open the routes that are longer by a site."""
        shape = one.shape

        def may_go_on(site: int) -> bool:
            self._spent += BOUNDED
            bound = max(one.bound, self._evaluation.going_on_bound(shape, one.route, site))
            if bound * WORTH < self._best:
                return True
            self._leave(bound)
            return False

        for further in self._ways.longer(shape, one.route if one.route.sites else None, may_go_on):
            self._spent += BOUNDED
            if (least := self._evaluation.route_bound(shape, further, self._request.max_sites)) is None:
                continue
            least = max(one.bound, least)
            expected = least * (one.crowding or 1.0) * ON_THE_WAY
            longer = one._replace(expected=expected, bound=least, depth=one.depth - 1, route=further)
            if further.is_whole(shape) and least * WORTH < self._best:
                for bound, arranged_shape in self._space.arranged(shape, further, least):
                    self._cut(longer._replace(bound=bound, shape=arranged_shape))
            else:
                self._open(longer)

    def _cut(self, one: _Opened) -> None:
        """Place the layouts with the best cuts of a whole route, and open those with others."""
        self._spent += EXPANDED * one.shape.virtual_stages
        bound = max(one.bound, self._evaluation.cuts_bound(one.shape, one.route))
        if bound * WORTH >= self._best:
            self._leave(bound)
            return
        one = one._replace(bound=bound)
        first = self._place(one, None)
        cuts = self._evaluation.cuts_below(one.shape, one.route, self._best)
        self._open(one._replace(expected=max(first, bound * (one.crowding or 1.0)) * WORTH, cuts=cuts))

    def _cut_further(self, one: _Opened) -> None:
        """Place layouts with further cuts, where those that were scheduled did not take much longer than the best."""
        known = self._reached.get((one.shape, one.route), 0.0)
        if known > one.expected:
            self._open(one._replace(expected=known))
        elif more := list(islice(one.cuts or (), TOGETHER)):
            self._spent += len(more) * one.shape.virtual_stages
            first = self._place(one, more)
            self._open(one._replace(expected=max(first, one.expected) * LATER))

    def _place(self, one: _Opened, cuts: list[tuple[int, ...]] | None) -> float:
        """Place the layouts of a route with these cuts; return the least of their bounds."""
        first = bound = one.bound
        for number, candidate in enumerate(self._evaluation.candidates(one.shape, one.route, cuts)):
            if candidate.layout in self._tried:
                continue
            self._tried.add(candidate.layout)
            least = max(bound, candidate.score_bound)
            first = min(first, least) if number else least
            expected = max(least, bound * (one.crowding or 1.0)) * (1 + candidate.actions / MANY_ACTIONS)
            heappush(self._placed, (expected, next(self._order), candidate, least))
            self._spent += EXPANDED * candidate.layout.virtual_stages
        return first


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
