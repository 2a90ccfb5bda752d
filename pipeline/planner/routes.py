"""The routes of a shape: orders of sites that a pipeline goes through, and how many ranks each holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.shapes import room


@dataclass(frozen=True)
class Route:
    """Sites in pipeline order, and the pipeline ranks at each: the Partitions of Algorithm 1 (Atlas)."""

    sites: tuple[int, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class _Partial:
    sites: tuple[int, ...]
    stages: tuple[int, ...]
    flops_per_s: float
    link_s: float
    price: float


def routes(cluster: Cluster, shape: Shape, request: Request, *, most: int) -> tuple[list[Route], bool]:
    """Routes, those with most operations per second and shortest links first, and whether these are all.

    Each site takes as many ranks as it has room for, until none are left (steps 3 to 10 of
    Algorithm 1). The paper is given the order of sites; here every order along links is tried, as
    far as ``most`` go at a time. Of sites that are alike in all, one order stands for the others.
    """
    caps = room(cluster, shape.gpus_per_rank, shape.replicas)
    kinds = _kinds(cluster, caps, request)
    alike = _alike(cluster, kinds)
    found: list[Route] = []
    complete = True
    level = [
        _Partial(
            (site,),
            (held := min(cap, shape.num_stages),),
            held * cluster.sites[site].gpu.flops_per_s,
            0.0,
            held * cluster.sites[site].price,
        )
        for site, cap in enumerate(caps)
        if cap and (not request.home or site in request.home)
    ]
    while level:
        level, seen = sorted(level, key=lambda one: (-one.flops_per_s, one.link_s, one.price)), set()
        following: list[_Partial] = []
        kept = 0
        for one in level:
            whole = sum(one.stages) == shape.num_stages
            alone = whole and len(one.sites) == 1  # then links do not matter
            name = ("alone", kinds[one.sites[0]]) if alone else tuple(alike[site] for site in one.sites)
            if name in seen:
                continue
            seen.add(name)
            if kept == most:
                complete = False
                break
            kept += 1
            if whole:
                if not request.home or one.sites[-1] in request.home:
                    found.append(Route(one.sites, one.stages))
                continue
            if request.max_sites and len(one.sites) == request.max_sites:
                continue
            following += _longer(cluster, one, caps, shape)
        level = following
    return found, complete


def _longer(cluster: Cluster, one: _Partial, caps: list[int], shape: Shape) -> list[_Partial]:
    left = shape.num_stages - sum(one.stages)
    longer = []
    for site, cap in enumerate(caps):
        link = cluster.link(one.sites[-1], site)
        if cap and site not in one.sites and link is not None:
            seconds = link.latency_s + 1e9 / min(link.bandwidth_bps, link.pair_bps)
            held = min(cap, left)
            speed = one.flops_per_s + held * cluster.sites[site].gpu.flops_per_s
            price = one.price + held * cluster.sites[site].price
            longer.append(_Partial((*one.sites, site), (*one.stages, held), speed, one.link_s + seconds, price))
    return longer


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
