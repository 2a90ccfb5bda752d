"""The prices of a layout's GPUs, and the bytes that leave sites."""

from __future__ import annotations

from itertools import combinations

from weft.pipeline.planner.cluster import Link
from weft.pipeline.planner.estimates import Estimates, reduced_bytes
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.planner.routes import Route


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
        reduced = reduced_bytes(layout) * self._work.parameters * (layout.routes - 1)
        return len(list(route.hops(layout))) * each + reduced

    def egress(self, shape: Shape, route: Route) -> float:
        """Return the cost of a step's activations and gradients between stages at different sites."""
        prices = sum(2 * self._between(here, there).egress_price for here, there in route.hops(shape))
        return prices * shape.crossings * self._work.message_bytes * shape.sequences / shape.routes / 1e9

    def reduced_egress(self, layout: Layout) -> float:
        """Return the cost of a step's bytes between replicas at different sites: gradients and weights."""
        if layout.routes == 1:
            return 0.0
        ways, paid = layout.ways, 0.0
        works = self._estimates.of_ranks(ways[0], lambda work, held, site: work)
        for work, at in zip(works, zip(*(way.site_of() for way in ways), strict=True), strict=True):
            prices = sum(2 * self._between(here, there).egress_price for here, there in combinations(at, 2))
            paid += prices * reduced_bytes(layout) * work.parameters / layout.routes
        return paid / 1e9

    def _between(self, here: int, there: int) -> Link:
        link = self._cluster.link(here, there)
        assert link is not None, "not neighbours"
        return link
