"""Branch and bound: parts of the space are divided, or scheduled, in the order of their expected scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from math import inf
from typing import NamedTuple

from weft.pipeline.planner.bounds import ANYWHERE
from weft.pipeline.planner.candidates import Candidate
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.request import EQUAL, Request
from weft.pipeline.planner.routes import Route, Routes
from weft.pipeline.planner.space import Family, Space

WORTH = 1.002
"""At first, a layout is expanded only if its bound is better than the best score by a five hundredth."""
SHARE_OF_EQUALS = 4
"""The effort for layouts that are better by less, or cheaper, is at most 1 / `SHARE_OF_EQUALS` of all."""
SHARE_OF_DIVES = 3
"""The effort for whole routes of shapes that cross sites is at most 1 / `SHARE_OF_DIVES` of all. See `Search._dive`."""
SHARE_OF_A_DIVE = 12
"""The effort for the whole route of one shape is at most 1 / `SHARE_OF_A_DIVE` of all."""
SHARE_OF_BOUNDS = 5
"""The effort at the end for the parts of the least bound is 1 / `SHARE_OF_BOUNDS` of all."""
BOUNDED = 16
"""Actions whose scheduling takes as long as the bound of a route."""
EXPANDED = 5
"""Actions whose scheduling takes as long as the bound of a layout, a rank."""
WITHOUT_PLAN = 6_000_000
"""The effort after which a pass ends that has no plan."""
EVERY = 10_000
"""Effort after which a layout is scheduled, so that there is a score to prune with early."""
OF_MANY, WITHOUT_ROUTE, ON_THE_WAY = 1.04, 1.02, 1.01
"""Expected ratio of the best score to the bound: for a family, for a shape, and for an unfinished route."""
MANY_ACTIONS = 1e6
"""Actions for which another layout is scheduled first that may be half as good."""
LATER = 1.02
"""Factor by which that ratio grows with every `TOGETHER` cuts of a route."""
TOGETHER = 8
"""Number of cuts of a route that are expanded together, those with the fastest slowest rank first."""


class Opened(NamedTuple):
    """A part of the space in the queue of the search, which may still be divided.

    Attributes:
        expected: score that orders the search.
        bound: lower bound of the scores of the part.
        shape: the shape; if ``family`` is set, any shape of the family, with any of its numbers of stages.
        route: the first sites of the part's layouts.
        crowding: ratio of ``expected`` to ``bound``; None if unknown.
        cuts: the remaining cuts of a whole route, or None before its first cuts are placed.
    """

    expected: float
    bound: float
    depth: int
    number: int
    shape: Shape
    family: Family | None = None
    route: Route = ANYWHERE
    crowding: float | None = None
    cuts: Iterator[tuple[int, ...]] | None = None


class Placed(NamedTuple):
    """A candidate in the queue of layouts to schedule.

    Attributes:
        expected: score that orders the queue.
        number: unique number, which breaks ties.
        bound: lower bound of the candidate's score.
    """

    expected: float
    number: int
    candidate: Candidate
    bound: float


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        predictions: scheduled layouts.
        left_out: least bound of the parts that were not examined.
        spare: candidates that were not scheduled, with their bounds.
    """

    predictions: list[Prediction]
    left_out: float
    spare: list[tuple[float, Candidate]]


_SHAPE = tuple(field.name for field in fields(Shape))


def place_of(layout: Layout) -> tuple[Shape, Route]:
    """Return the shape and the route of a layout."""
    return Shape(**{name: getattr(layout, name) for name in _SHAPE}), Route(layout.sites, layout.stages)


class Search:
    """A pass of branch and bound.

    Args:
        request: the request, with the number of sites of a pipeline and the effort of this pass.
        routes: numbers of routes that are searched.
        best: best score so far.
        is_last: True if no pass follows; it then also searches layouts with equal scores, and improves the bound.
    """

    def __init__(self, space: Space, request: Request, routes: range, best: float = inf, *, is_last: bool) -> None:
        self._space, self._request, self._best, self._is_last = space, request, best, is_last
        self._evaluation, self._ways = space.evaluation, Routes(space.cluster, request)
        self._order, self._spent, self._worth = count(), 0, WORTH
        self._by_bound, self._dived = False, 0
        self._opened: list[Opened] = []
        self._placed: list[Placed] = []
        self._later: list[Opened] = []  # what can be better by little
        self._spare: list[Placed] = []
        self._found: list[Prediction] = []
        self._tried: set[Layout] = set()
        self._reached: dict[tuple[Shape, Route], float] = {}
        alone = request.max_sites == 1
        self._families: list[tuple[float, int, Iterator[Family], Family | None]] = [
            (bound, next(self._order), space.families(degrees, routes, alone=alone), None)
            for bound, degrees in space.degrees
        ]
        heapify(self._families)

    def run(self) -> Found:
        """Divide or schedule all parts that may be better than the best, until none is left or the effort is spent."""
        effort = self._request.effort
        if self._is_last:
            self._go(effort - effort // SHARE_OF_BOUNDS)
            self._go_by_bounds()
        self._go(effort)
        if self._is_last and self._spent < effort:
            self._worth = 1 - EQUAL
            parts, self._later = self._later, []
            self._placed += self._spare
            self._spare = []
            heapify(self._placed)
            for one in parts:
                self._open(one)
            self._go(min(effort, self._spent + effort // SHARE_OF_EQUALS))
        spare = [*self._spare, *self._placed]
        left = [one.bound for one in [*self._opened, *self._later]] + [one.bound for one in spare]
        left += [one[0] for one in self._families]
        return Found(self._found, min(left, default=inf), [(one.bound, one.candidate) for one in spare])

    def _go(self, effort: int) -> None:
        """Search until ``effort`` is spent, or more of it if there is no plan, or no part is left."""
        due, opened, placed = self._spent + EVERY, self._opened, self._placed
        while self._spent < (WITHOUT_PLAN if self._best == inf else effort):
            self._open_families()
            while opened and self._is_poor(opened[0].bound):
                self._later.append(heappop(opened))
            while placed and self._is_poor(placed[0].bound):
                self._spare.append(heappop(placed))
            if not opened and not placed:
                if not self._families or self._is_poor(self._families[0][0]):
                    break
            elif not opened or (placed and (opened[0].expected >= placed[0].expected or self._spent >= due)):
                self._schedule()
                due = self._spent + EVERY
            else:
                self._take_apart(heappop(opened))

    def _go_by_bounds(self) -> None:
        """Switch the order of the search to bounds: from now on the part with the least bound is expanded first."""
        self._by_bound = True
        self._opened[:] = [one._replace(expected=one.bound) for one in self._opened]
        self._placed[:] = [one._replace(expected=one.bound) for one in self._placed]
        heapify(self._opened)
        heapify(self._placed)

    def _is_poor(self, bound: float) -> bool:
        return bound * self._worth >= self._best

    def _open(self, one: Opened) -> None:
        if self._is_poor(one.bound):
            self._later.append(one)
        else:
            expected = one.bound if self._by_bound else one.expected
            heappush(self._opened, one._replace(expected=expected, number=next(self._order)))

    def _open_families(self) -> None:
        """Add families to the queue one at a time, while their bound comes before the first part of the queue."""
        families = self._families
        while families and not self._is_poor(families[0][0]):
            bound, number, following, family = families[0]
            if self._opened and self._opened[0].expected < bound * (1.0 if self._by_bound else OF_MANY):
                return
            heappop(families)
            if family is not None:
                self._spent += 1
                self._open(Opened(bound * OF_MANY, bound, 0, 0, family.shape, family))
            if (another := next(following, None)) is not None:
                heappush(families, (max(bound, another.bound), number, following, another))

    def _schedule(self) -> None:
        one = heappop(self._placed)
        key = place_of(one.candidate.layout)
        if not self._by_bound and (known := self._reached.get(key, 0.0)) > one.expected:
            heappush(self._placed, one._replace(expected=known))  # as others did that differ in their cut
            return
        self._spent += one.candidate.actions
        if (prediction := self._evaluation.schedule(one.candidate)) is not None:
            self._found.append(prediction)
            score = self._request.score(prediction)
            self._reached[key] = min(self._reached.get(key, inf), score)
            self._best = min(self._best, score)

    def _take_apart(self, one: Opened) -> None:
        if one.family is not None:
            self._take_stages(one, one.family)
        elif one.cuts is not None:
            self._cut_further(one, one.cuts)
        elif one.route.sites and one.route.is_whole(one.shape):
            self._cut(one)
        elif one.crowding is None:
            crowding = max(self._evaluation.crowding(one.shape), self._dive(one) / one.bound)
            self._open(one._replace(expected=one.bound * crowding * WITHOUT_ROUTE, crowding=crowding))
        else:
            self._go_on(one)

    def _take_stages(self, one: Opened, family: Family) -> None:
        """Queue the shapes of a family with the largest remaining number of stages, and the rest of the family."""
        *rest, stages = family.counts
        if rest:
            bound = max(one.bound, family.bounds[len(rest) - 1])
            others = family._replace(counts=tuple(rest))
            self._open(one._replace(expected=bound * OF_MANY, bound=bound, family=others))
        for bound, shape in self._space.members(one.shape, stages):
            self._spent += BOUNDED
            bound = max(bound, one.bound)
            self._open(Opened(bound * WITHOUT_ROUTE, bound, 0, 0, shape))

    def _dive(self, one: Opened) -> float:
        """Queue layouts on one whole route of a shape, and return the least of their bounds; 0 without a route.

        It fills one site after the other, as Algorithm 1 of Atlas does, and goes on to the site of the least bound.
        Long routes have many beginnings with equal bounds, of which a search in the order of bounds completes none.
        Once a layout has been scheduled, its score prunes these beginnings, and nothing is done here.
        """
        shape, start = one.shape, self._spent
        if self._found or not self._ways.is_long(shape) or self._dived > self._request.effort // SHARE_OF_DIVES:
            return 0.0
        whole = self._completed(shape, ANYWHERE, one.bound, start + self._request.effort // SHARE_OF_A_DIVE)
        self._dived += self._spent - start
        if whole is None:
            return 0.0
        least, route = whole
        start = self._spent
        bounds = []
        for bound, placed in self._space.arranged(shape, route, least):
            self._spent += EXPANDED * placed.virtual_stages
            for _, table in self._evaluation.tables(placed, route)[:1]:
                part = one._replace(bound=max(one.bound, bound), shape=placed, route=route, crowding=1.0)
                bounds.append(self._place(part, list(table.best())))
        self._dived += self._spent - start
        if self._placed and bounds and not self._is_poor(min(bounds)):
            self._schedule()
        return min(bounds, default=0.0)

    def _completed(self, shape: Shape, route: Route, least: float, until: int) -> tuple[float, Route] | None:
        """Return a whole route that begins with ``route``, with its bound, or None if the effort ``until`` is spent.

        The next site is the one of the least bound from which the route can be completed.
        """
        if route.is_whole(shape):
            return least, route
        further: list[tuple[float, int, Route]] = []
        for longer in self._ways.filled(shape, route):
            self._spent += BOUNDED
            if (bound := self._evaluation.route_bound(shape, longer, self._request.max_sites)) is not None:
                further.append((bound, len(further), longer))
        for bound, _, longer in sorted(further):
            if self._spent > until:
                break
            if (found := self._completed(shape, longer, bound, until)) is not None:
                return found
        return None

    def _go_on(self, one: Opened) -> None:
        """Queue the routes that extend the part's route by one site."""
        shape, poor = one.shape, inf

        def may_go_on(site: int) -> bool:
            nonlocal poor
            self._spent += BOUNDED
            bound = max(one.bound, self._evaluation.going_on_bound(shape, one.route, site))
            if self._is_poor(bound):
                poor = min(poor, bound)
                return False
            return True

        for further in self._ways.longer(shape, one.route if one.route.sites else None, may_go_on):
            self._spent += BOUNDED
            if (least := self._evaluation.route_bound(shape, further, self._request.max_sites)) is None:
                continue
            least = max(one.bound, least)
            expected = least * (one.crowding or 1.0) * ON_THE_WAY
            longer = one._replace(expected=expected, bound=least, depth=one.depth - 1, route=further)
            if further.is_whole(shape) and not self._is_poor(least):
                for bound, arranged_shape in self._space.arranged(shape, further, least):
                    self._open(longer._replace(bound=bound, shape=arranged_shape))
            else:
                self._open(longer)
        if poor < inf:
            self._later.append(one._replace(bound=poor))

    def _cut(self, one: Opened) -> None:
        """Queue the layouts with the best cuts of a whole route for scheduling, and the route's other cuts as parts."""
        self._spent += EXPANDED * one.shape.virtual_stages
        limit = self._best * (1 + EQUAL)
        for number, (bound, table) in enumerate(self._evaluation.tables(one.shape, one.route)):
            part = one._replace(bound=max(one.bound, bound), number=next(self._order))
            expected, best = part.bound * (one.crowding or 1.0), table.best()
            if number == 0 and not self._is_poor(part.bound):
                expected = max(expected, self._place(part, list(best)))
            cuts = chain(best, self._evaluation.cuts_below(table, one.shape, one.route, limit))
            self._open(part._replace(expected=expected * WORTH, cuts=cuts))

    def _cut_further(self, one: Opened, cuts: Iterator[tuple[int, ...]]) -> None:
        """Queue layouts with further cuts, unless the scheduled cuts of this route took much longer than expected."""
        known = self._reached.get((one.shape, one.route), 0.0)
        if known > one.expected and not self._by_bound:
            self._open(one._replace(expected=known))
        elif more := list(islice(cuts, TOGETHER)):
            self._spent += len(more) * one.shape.virtual_stages
            first = self._place(one, more)
            self._open(one._replace(expected=max(first, one.expected) * LATER))

    def _place(self, one: Opened, cuts: list[tuple[int, ...]]) -> float:
        """Queue the layouts of a route with these cuts for scheduling; return the least of their bounds."""
        first = bound = one.bound
        for number, candidate in enumerate(self._evaluation.candidates(one.shape, one.route, cuts)):
            if candidate.layout in self._tried:
                continue
            self._tried.add(candidate.layout)
            least = max(bound, candidate.score_bound)
            first = min(first, least) if number else least
            expected = max(least, bound * (one.crowding or 1.0)) * (1 + candidate.actions / MANY_ACTIONS)
            placed = Placed(least if self._by_bound else expected, next(self._order), candidate, least)
            heappush(self._placed, placed)
            self._spent += EXPANDED * candidate.layout.virtual_stages
        return first
