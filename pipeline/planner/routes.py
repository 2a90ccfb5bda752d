"""The routes of a shape: orders of sites that a pipeline goes through, and how many ranks each holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.shapes import room


@dataclass(frozen=True)
class Route:
    """Sites in pipeline order, and the pipeline ranks at each: the Partitions of Algorithm 1 (Atlas)."""

    sites: tuple[int, ...]
    stages: tuple[int, ...]

    def is_whole(self, shape: Shape) -> bool:
        """Whether it has all of a shape's ranks."""
        return sum(self.stages) == shape.num_stages


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
        sites, stages = (route.sites, route.stages) if route else ((), ())
        if most and len(sites) == most:
            return
        left, seen = shape.num_stages - sum(stages), set()
        for site in self._neighbours[sites[-1]] if sites else self._cheapest:
            held, whole = min(caps[site], left), caps[site] >= left
            if not held or site in sites or (home and site not in home and (whole or not sites)):
                continue
            if whole and not sites and shape.crossings > 1 and "arrangement" not in self._request.pins:
                continue  # in one site it is a site fold
            name = ("alone", kinds[site]) if whole and not sites else alike[site]  # then links do not matter
            if name not in seen:
                seen.add(name)
                yield Route((*sites, site), (*stages, held))

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
        key = (shape.gpus_per_rank, shape.replicas)
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
