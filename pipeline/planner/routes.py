"""The routes of a shape: the order of sites that a pipeline goes through, and how many ranks each site holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.shapes import site_capacity

FEW_SITES = 6
"""Sites of a cluster up to which all routes are searched at once, and sets of replicas go through several sites."""


@dataclass(frozen=True)
class Route:
    """Sites in pipeline order, and the pipeline ranks at each: the Partitions of Algorithm 1 (Atlas).

    If sets of replicas go through different sites, the route is the concatenation of the sets' routes.
    """

    sites: tuple[int, ...]
    stages: tuple[int, ...]

    def is_whole(self, shape: Shape) -> bool:
        """Return True if the route has places for all ranks of a shape."""
        return sum(self.stages) == shape.routes * shape.num_stages

    def hops(self, shape: Shape) -> Iterator[tuple[int, int]]:
        """Yield the pairs of sites between which a pipeline sends."""
        held = 0
        for (here, there), stages in zip(pairwise(self.sites), self.stages, strict=False):
            held += stages
            if held % shape.num_stages:
                yield here, there

    def last(self, shape: Shape) -> Route:
        """Return the part of the route that belongs to the last set of replicas, which may be incomplete."""
        before, rest = divmod(sum(self.stages), shape.num_stages)
        skipped, left = 0, (before - (rest == 0)) * shape.num_stages
        while left > 0:
            left -= self.stages[skipped]
            skipped += 1
        return Route(self.sites[skipped:], self.stages[skipped:]) if skipped else self


class Routes:
    """The routes of shapes, extended one site at a time.

    In Algorithm 1 (steps 3 to 10) each site takes as many ranks as it has GPUs for, in a given order. Here a site
    may hold fewer, and every order along links is a route. If sites are equivalent, only the order with the cheapest
    ones first is tried.
    """

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self._cluster, self._request = cluster, request
        self._known: dict[tuple[int, int], tuple[list[int], list[Hashable], list[Hashable]]] = {}
        self._cheapest = sorted(range(len(cluster.sites)), key=lambda site: cluster.sites[site].price)
        self._neighbours = [
            [site for site in self._cheapest if cluster.link(here, site) is not None]
            for here in range(len(cluster.sites))
        ]

    def longer(
        self, shape: Shape, route: Route | None, may_go_on: Callable[[int], bool] = lambda site: True
    ) -> Iterator[Route]:
        """Yield the routes that extend ``route`` by one site, with every possible number of ranks there.

        Without a route, yield the routes of one site.

        Args:
            may_go_on: returns False for a site from which no pipeline that continues to another site is worth trying.
        """
        caps, kinds, alike = self._of(shape)
        home, most = self._request.home, self._request.max_sites
        taken, ranks = (route.sites, route.stages) if route else ((), ())
        left = shape.num_stages - sum(ranks) % shape.num_stages
        last = route.last(shape).sites if route and left < shape.num_stages else ()
        if most and len(last) == most:
            return
        after = self._cheapest.index(route.last(shape).sites[0]) if route and not last else -1
        seen: set[Hashable] = set()
        for site in self._neighbours[last[-1]] if last else self._cheapest[after + 1 :]:
            if not caps[site] or site in taken:
                continue
            is_home = not home or site in home
            # Of one pipeline in one site links do not matter.
            name: Hashable = ("alone", kinds[site]) if not last and shape.routes == 1 else alike[site]
            if caps[site] >= left and is_home and name not in seen:
                seen.add(name)
                yield Route((*taken, site), (*ranks, left))
            goes_on = (is_home or last) and (not most or len(last) + 1 < most)
            if goes_on and left > 1 and ("on", alike[site]) not in seen:
                seen.add(("on", alike[site]))
                if may_go_on(site):
                    for held in range(min(caps[site], left - 1), 0, -1):
                        yield Route((*taken, site), (*ranks, held))

    def is_long(self, shape: Shape) -> bool:
        """Return True if no two sites have enough GPUs for all ranks of a pipeline."""
        return shape.num_stages > sum(sorted(self._of(shape)[0])[-2:])

    def filled(self, shape: Shape, route: Route) -> Iterator[Route]:
        """Yield the routes that extend ``route`` by one site, with as many ranks there as the site has GPUs for."""
        caps, placed = self._of(shape)[0], sum(route.stages)
        left = shape.num_stages - placed % shape.num_stages
        for longer in self.longer(shape, route if placed else None):
            if longer.stages[-1] == min(left, caps[longer.sites[-1]]):
                yield longer

    def _of(self, shape: Shape) -> tuple[list[int], list[Hashable], list[Hashable]]:
        """Return, by site, its capacity in ranks, its kind and its equivalence class."""
        key = (shape.gpus_per_rank, shape.replicas_of_route)
        if key not in self._known:
            caps = site_capacity(self._cluster, *key)
            kinds = _kinds(self._cluster, caps, self._request)
            self._known[key] = caps, kinds, _alike(self._cluster, kinds)
        return self._known[key]


def _kinds(cluster: Cluster, caps: list[int], request: Request) -> list[Hashable]:
    """Return, by site, the properties that matter to a route, except links; prices only if cost matters."""
    money = request.objective is Objective.cost or request.max_cost_per_hour
    return [
        (
            site.gpu.name,
            site.gpus_per_host,
            site.network_bps,
            caps[number],
            number in request.home,
            site.price if money else 0.0,
        )
        for number, site in enumerate(cluster.sites)
    ]


def _alike(cluster: Cluster, kinds: list[Hashable]) -> list[Hashable]:
    """Return, by site, its equivalence class: its kind if all sites of a kind have equal links, else its number."""
    links: dict[Hashable, Hashable] = {}
    for here in range(len(kinds)):
        for there in range(here):
            between = frozenset((kinds[here], kinds[there]))
            if links.setdefault(between, cluster.link(here, there)) != cluster.link(here, there):
                return list(range(len(kinds)))
    return kinds
