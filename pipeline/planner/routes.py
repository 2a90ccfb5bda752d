"""The routes of a shape: orders of sites that a pipeline goes through, and how many ranks each holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.shapes import room

FEW_SITES = 6
"""Sites of a cluster up to which all routes are searched at once, and sets of replicas go through several sites."""


@dataclass(frozen=True)
class Route:
    """Sites in pipeline order, and the pipeline ranks at each: the Partitions of Algorithm 1 (Atlas).

    Where sets of replicas go through sites of their own, one set's after the other's.
    """

    sites: tuple[int, ...]
    stages: tuple[int, ...]

    def is_whole(self, shape: Shape) -> bool:
        """Whether it has all of a shape's ranks."""
        return sum(self.stages) == shape.routes * shape.num_stages

    def hops(self, shape: Shape) -> Iterator[tuple[int, int]]:
        """Pairs of sites that a pipeline crosses the border of."""
        held = 0
        for (here, there), stages in zip(pairwise(self.sites), self.stages, strict=False):
            held += stages
            if held % shape.num_stages:
                yield here, there

    def last(self, shape: Shape) -> Route:
        """That of the last set of replicas, as far as it goes."""
        before, rest = divmod(sum(self.stages), shape.num_stages)
        skipped, left = 0, (before - (rest == 0)) * shape.num_stages
        while left > 0:
            left -= self.stages[skipped]
            skipped += 1
        return Route(self.sites[skipped:], self.stages[skipped:]) if skipped else self


class Routes:
    """The routes of shapes, a site at a time.

    Each site takes as many ranks as it has room for, until none are left (steps 3 to 10 of
    Algorithm 1). The paper is given the order of sites; here every order along links is a route.
    Of sites that are alike in all, one order stands for the others, the one of the cheapest.
    """

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self._cluster, self._request = cluster, request
        self._known: dict[tuple[int, int], tuple[list[int], list[Hashable], list[Hashable]]] = {}
        self._cheapest = sorted(range(len(cluster.sites)), key=lambda site: cluster.sites[site].price)
        self._neighbours = [
            [site for site in self._cheapest if cluster.link(here, site) is not None]
            for here in range(len(cluster.sites))
        ]

    def longer(self, shape: Shape, route: Route | None) -> Iterator[Route]:
        """Routes that go on from one for a site, or of one site."""
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
            held, whole = min(caps[site], left), caps[site] >= left
            if not held or site in taken or (home and site not in home and (whole or not last)):
                continue
            if whole and not last and shape.crossings > 1 and "arrangement" not in self._request.pins:
                continue  # in one site it is a site fold
            # Of one pipeline in one site links do not matter.
            name = ("alone", kinds[site]) if whole and not last and shape.routes == 1 else alike[site]
            if name not in seen:
                seen.add(name)
                yield Route((*taken, site), (*ranks, held))

    def fold_over_sites(self, shape: Shape) -> Shape | None:
        """The fold through all ranks in place of one within each site; None where that is no other choice.

        It crosses borders between sites more often, so its bound is never less.
        """
        if shape.arrangement != "site_fold" or "arrangement" in self._request.pins or self._request.max_sites == 1:
            return None
        caps, _, _ = self._of(shape)
        return replace(shape, arrangement="fold") if any(0 < cap < shape.num_stages for cap in caps) else None

    def _of(self, shape: Shape) -> tuple[list[int], list[Hashable], list[Hashable]]:
        """By site, the ranks that it has room for, its kind, and what stands for it."""
        key = (shape.gpus_per_rank, shape.replicas_of_route)
        if key not in self._known:
            caps = room(self._cluster, *key)
            kinds = _kinds(self._cluster, caps, self._request)
            self._known[key] = caps, kinds, _alike(self._cluster, kinds)
        return self._known[key]


def _kinds(cluster: Cluster, caps: list[int], request: Request) -> list[Hashable]:
    """By site, all that a route through it depends on but links; prices only where money counts."""
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
    """By site, what stands for it: its kind if sites of a kind also have the same links, else itself."""
    links: dict[Hashable, Hashable] = {}
    for here in range(len(kinds)):
        for there in range(here):
            between = frozenset((kinds[here], kinds[there]))
            if links.setdefault(between, cluster.link(here, there)) != cluster.link(here, there):
                return list(range(len(kinds)))
    return kinds
