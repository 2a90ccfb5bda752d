"""The links that pipelines cross: seconds of a micro-batch on each, and the delay of each rank after the first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import MOST_CELL
from weft.pipeline.planner.routes import Route


@dataclass(frozen=True)
class Hops:
    """Seconds in which a micro-batch gets from one site to another.

    Attributes:
        way_s: seconds of each hop, by its two sites.
        sent_s: seconds until the message has left, if only one pair of hosts sends.
        held_s: seconds for which the message occupies the uplink.
        quickest_s: by number of hops, the sum of the quickest ones.
        least_way_s: seconds of the quickest hop from a site, or from any site (None).
        least_sent_s, least_held_s: the same for ``sent_s`` and ``held_s``.
        cell: maximum number of replicas that pool their uplinks; they send in turns, each ``cell`` times as fast.
    """

    way_s: dict[tuple[int, int], float]
    sent_s: dict[tuple[int, int], float]
    held_s: dict[tuple[int, int], float]
    quickest_s: list[float]
    least_way_s: dict[int | None, float]
    least_sent_s: dict[int | None, float]
    least_held_s: dict[int | None, float]
    cell: int


class Crossings:
    """The crossings of one model on one cluster.

    Args:
        cell: number of replicas of a DP-cell; None means that it is not fixed.
    """

    def __init__(self, estimates: Estimates, cell: int | None = None) -> None:
        self._estimates, self._cluster, self._work = estimates, estimates.cluster, estimates.work
        self._cell = cell or MOST_CELL
        self._memo, self._own = estimates.memo, estimates.known

    def of(
        self, shape: Shape, route: Route, roomiest: list[tuple[int, int]]
    ) -> tuple[list[tuple[int, float]], float, float] | None:
        """Return the delays of ranks, the seconds of the slowest uplink, and those of the busiest two-way sender.

        The delays are (number of ranks, seconds from the first rank), in pipeline order. The second value is the
        seconds for which one micro-batch occupies the slowest uplink. The third is the seconds of a step for a rank
        that sends in both directions. Ranks that the route does not place are as close as the quickest links and the
        largest sites allow. None if links or sites do not suffice.

        Args:
            roomiest: (site, number of ranks that fit), the largest first.
        """
        known = self.hops(shape)
        sent_s = [known.sent_s[hop] for hop in pairwise(route.sites)]
        ways_s = list(accumulate((known.way_s[hop] for hop in pairwise(route.sites)), initial=0.0))
        chain = list(zip(route.stages, ways_s, strict=False))
        here = route.sites[-1] if route.sites else None
        left, further = shape.num_stages - sum(route.stages), -1 if here is None else 0
        for site, cap in roomiest:
            if left <= 0 or not cap:
                break
            if site not in route.sites:
                further += 1
                if further == len(known.quickest_s) or (further and here not in known.least_way_s):
                    return None
                quickest_s = known.quickest_s[further]
                if further:
                    quickest_s = max(quickest_s, known.least_way_s[here] + known.quickest_s[further - 1])
                chain.append((min(cap, left), ways_s[-1] + quickest_s))
                left -= cap
        if left > 0:
            return None
        held_s = [known.held_s[hop] for hop in pairwise(route.sites)]
        if further > 0:
            sent_s.append(known.least_sent_s[here])
            held_s += [known.least_held_s[here], *[known.least_held_s[None]] * (further - 1)]
        most = roomiest[0][1]
        sending_s = 0.0
        for site, (before_s, after_s) in enumerate(pairwise(held_s), start=1):
            held, way_s = chain[site]
            if held == 1 and (site < len(route.sites) or most == 1):
                each_s = shape.crossings * (before_s + after_s)
                sending_s = max(sending_s, shape.microbatches * each_s - before_s + 2 * way_s)
        return chain, max(sent_s, default=0.0), sending_s

    def completions(self, shape: Shape, route: Route, caps: list[int]) -> list[tuple[float, float]]:
        """Return (seconds of sending over the slowest hop, sum of prices) of the hops that complete a pipeline's route.

        Completions that another one beats in both values are left out. Every site holds as many ranks as it can.

        Args:
            caps: by site, the number of ranks that fit.
        """
        hops, links = self.hops(shape), self._cluster.link
        left = shape.num_stages - sum(route.stages)
        key = (self._own, "completions", *self._key(shape), tuple(caps), route.sites, left)
        if (known := self._memo.get(key)) is not None:
            return known
        found: list[tuple[float, float]] = []

        def extend(sites: tuple[int, ...], left: int, sent_s: float, price: float) -> None:
            if any(one[0] <= sent_s and one[1] <= price for one in found):
                return
            if left <= 0:
                found.append((sent_s, price))
                return
            for site, cap in enumerate(caps):
                if not cap or site in sites:
                    continue
                if not sites:
                    extend((site,), left - cap, sent_s, price)
                elif (link := links(sites[-1], site)) is not None:
                    slowest_s = max(sent_s, hops.sent_s[sites[-1], site])
                    extend((*sites, site), left - cap, slowest_s, price + link.egress_price)

        extend(route.sites, left, 0.0, 0.0)
        self._memo.add(key, found)
        return found

    def hops(self, shape: Shape) -> Hops:
        """Return the seconds of hops over all links, with the largest possible DP-cell."""
        *_, cell = of = self._key(shape)
        key = (self._own, "hops", *of)
        if (found := self._memo.get(key)) is None:
            sent = self._work.message_bytes * shape.microbatch_size
            sent_s, held_s, way_s = {}, {}, {}
            for here, there in self._cluster.links:
                link = self._estimates.network.link_cost(here, there, shape)
                seconds = link.transit_s(sent)
                sent_s[here, there] = sent_s[there, here] = seconds
                held_s[here, there] = held_s[there, here] = link.occupancy_s(sent)
                way_s[here, there] = way_s[there, here] = link.latency_s + seconds / cell
            quickest = sorted(seconds for (here, there), seconds in way_s.items() if here < there)
            found = Hops(
                way_s=way_s,
                sent_s=sent_s,
                held_s=held_s,
                quickest_s=list(accumulate(quickest, initial=0.0)),
                least_way_s=_least(way_s),
                least_sent_s=_least(sent_s),
                least_held_s=_least(held_s),
                cell=cell,
            )
            self._memo.add(key, found)
        return found

    def _key(self, shape: Shape) -> tuple[int, int, int]:
        """Return what hops depend on; the last number is that of the replicas of a DP-cell, at most."""
        cell = min(self._cell, shape.replicas) if shape.may_pool else 1
        return shape.gpus_per_rank, shape.microbatch_size, cell


def local_s(estimates: Estimates, shape: Shape, bps_of_gpu: float) -> tuple[float, float]:
    """Return the seconds in which a micro-batch is sent between ranks of one site, and those until it arrives."""
    link = estimates.network.local_link(bps_of_gpu, shape)
    sent_s = link.transit_s(estimates.work.message_bytes * shape.microbatch_size)
    return sent_s, link.latency_s + sent_s


def _least(seconds: dict[tuple[int, int], float]) -> dict[int | None, float]:
    """Return the minimum over the hops from each site, and over all hops under the key None."""
    least: dict[int | None, float] = {}
    for (here, _), one in seconds.items():
        for site in (here, None):
            least[site] = min(least.get(site, one), one)
    return least
