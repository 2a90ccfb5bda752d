"""The hops of a job: which ranks hand tensors to each other, inside a site and over the WAN. No torch."""

from __future__ import annotations

from itertools import pairwise

from weft.comm.links import Hop
from weft.engine.planning.layout import RankLayout
from weft.pipeline.placement import Placement


def hops(placement: Placement, layout: RankLayout) -> tuple[set[Hop], set[Hop]]:
    """The hops inside a site, and those between two."""
    inside: set[Hop] = set()
    between: set[Hop] = set()
    for a, b in neighbours(placement):
        for route in range(layout.routes):
            found = between if crosses(layout, route, a, b) else inside
            for here, there in zip(layout.route_lines(route, a), layout.route_lines(route, b), strict=True):
                found.update([(here, there), (there, here)])
    return inside, between


def crosses(layout: RankLayout, route: int, a: int, b: int) -> bool:
    """True if two pipeline ranks of the replicas of a route lie at different sites."""
    sites = layout.rank_sites[route * layout.stages : (route + 1) * layout.stages]
    return sites[a] != sites[b]


def neighbours(placement: Placement) -> list[tuple[int, int]]:
    """Pairs of pipeline ranks with neighbouring virtual stages, the lower rank first."""
    return sorted({(min(a, b), max(a, b)) for a, b in pairwise(placement.stage_ranks) if a != b})
