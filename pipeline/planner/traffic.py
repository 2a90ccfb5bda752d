"""The prices of a layout's GPUs, and the bytes that leave sites."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, combinations
from math import comb
from typing import Any

from weft.pipeline.planner.bounds import ANYWHERE
from weft.pipeline.planner.cluster import Link
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.shapes import site_capacity
from weft.pipeline.workload import LayerWork


class Traffic:
    """The prices of GPUs and of WAN bytes, for layouts of one model on one cluster."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates, self._cluster, self._work = estimates, estimates.cluster, estimates.work

    def price(self, shape: Shape, route: Route) -> float:
        """Return the hourly price of the GPUs of a whole route."""
        sites = self._cluster.sites
        each = sum(sites[site].price * held for site, held in zip(route.sites, route.stages, strict=True))
        return each * shape.lines_of_route

    def wan_bytes(self, layout: Layout, route: Route) -> float:
        """Return the bytes that leave sites in a step.

        They are activations and their gradients between stages, and gradients and weights between replicas.
        """
        each = 2 * layout.crossings * self._work.message_bytes * layout.sequences / layout.routes
        reduced = sum(self._reduced(work, layout) for work, _ in self._pairs(layout))
        return len(list(route.hops(layout))) * each + reduced * layout.routes * (layout.routes - 1)

    def egress(self, shape: Shape, route: Route) -> float:
        """Return the cost of a step's activations and gradients between stages at different sites."""
        prices = sum(self._between(here, there).egress_price for here, there in route.hops(shape))
        return self.paid_for_hops(shape, prices)

    def reduced_egress(self, layout: Layout) -> float:
        """Return the cost of a step's bytes between replicas at different sites: gradients and weights."""
        return sum(2 * prices * self._reduced(work, layout) for work, prices in self._pairs(layout)) / 1e9

    def least_egress(self, shape: Shape, route: Route = ANYWHERE) -> float:
        """Return the least cost of a step's bytes between sites, for any layout whose route begins with ``route``."""
        prices = sum(self._between(here, there).egress_price for here, there in route.hops(shape))
        if not route.is_whole(shape):
            prices += self._further_prices(shape, route)
        return self.paid_for_hops(shape, prices) + self.least_reduced_egress(shape, route)

    def least_reduced_egress(self, shape: Shape, route: Route = ANYWHERE) -> float:
        """Return the least `reduced_egress`: all weights may be on the rank whose sites exchange them most cheaply."""
        if shape.routes == 1:
            return 0.0
        prices = self._least_price * comb(shape.routes, 2)
        if route.is_whole(shape):
            on = [site for site, held in zip(route.sites, route.stages, strict=True) for _ in range(held)]
            prices = min(map(self._prices, {tuple(on[rank :: shape.num_stages]) for rank in range(shape.num_stages)}))
        return 2 * prices * self._reduced(self._work.whole, shape) / 1e9

    def least_egress_of_families(self, family: Shape, sequences: Any, routes: Any, *, crosses: bool) -> Any:
        """Return the least cost of a step's bytes between sites, for arrays of sequences and routes.

        Args:
            crosses: True if every pipeline crosses at least one link.
        """
        of_two = family.changed(replicas=2 * family.expert, routes=2, zero_stage=1)
        reduced = self._reduced(self._work.whole, of_two) * (routes - 1)
        sent = self._work.message_bytes * sequences if crosses else 0.0
        return 2 * self._least_price * (sent + reduced) / 1e9

    def _further_prices(self, shape: Shape, route: Route) -> float:
        """Return the least sum of prices of the hops that complete a route."""
        caps = site_capacity(self._cluster, shape.gpus_per_rank, shape.replicas_of_route)
        begun, placed = divmod(sum(route.stages), shape.num_stages)
        free = [site for site, cap in enumerate(caps) if cap and site not in route.sites]
        space = list(accumulate(sorted((caps[site] for site in free), reverse=True)))
        of_one = sum(self._prices_of_links[: bisect_left(space, shape.num_stages)])
        prices = of_one * (shape.routes - begun - (placed > 0))
        if not placed:
            return prices
        links = [self._cluster.link(route.sites[-1], site) for site in free]
        following = min((link.egress_price for link in links if link is not None), default=0.0)
        return prices + following + sum(self._prices_of_links[: bisect_left(space, shape.num_stages - placed)])

    @cached_property
    def _prices_of_links(self) -> list[float]:
        return sorted(link.egress_price for link in self._cluster.links.values())

    @property
    def _least_price(self) -> float:
        return self._prices_of_links[0] if self._prices_of_links else 0.0

    def paid_for_hops(self, shape: Shape, prices: float) -> float:
        """Return the cost of a step's activations and gradients over hops whose prices of a gigabyte have this sum."""
        return 2 * prices * shape.crossings * self._work.message_bytes * shape.sequences / shape.routes / 1e9

    def _reduced(self, work: LayerWork, shape: Shape) -> float:
        """Return the bytes that all GPUs of a rank with this work send from one site to another in a step."""
        return self._estimates.across_bytes(work, shape) * shape.lines_of_route

    def _pairs(self, layout: Layout) -> list[tuple[LayerWork, float]]:
        """Return, by rank, its work and the sum of the prices of a gigabyte over all pairs of its sites."""
        if layout.routes == 1:
            return []
        ways = layout.ways
        works = self._estimates.works(ways[0])
        together = zip(*(way.site_of() for way in ways), strict=True)
        return [(work, self._prices(at)) for work, at in zip(works, together, strict=True)]

    def _prices(self, at: Sequence[int]) -> float:
        return sum(self._between(here, there).egress_price for here, there in combinations(at, 2))

    def _between(self, here: int, there: int) -> Link:
        link = self._cluster.link(here, there)
        assert link is not None, "not neighbours"
        return link
