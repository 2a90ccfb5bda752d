"""The links that pipelines cross: their seconds for a micro-batch, and the delay of ranks from the first one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import MOST_CELL
from weft.pipeline.planner.routes import Route


@dataclass(frozen=True)
class Hops:
    """Seconds of a micro-batch between sites.

    Attributes:
        way_s: seconds of each hop. ``sent_s``: until the message has left, one pair of hosts at a time. ``held_s``:
            while the uplink is occupied.
        quickest_s: sum of the quickest hops, by their number.
        cell: maximum number of replicas that pool their uplinks; they send in turns, each that much faster.
        least_way_s: seconds of the quickest hop from a site, or from any (None); likewise ``least_sent_s`` and
            ``least_held_s``.
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
        cell: replicas of a DP-cell, where it is fixed.
    """

    def __init__(self, estimates: Estimates, cell: int | None = None) -> None:
        self._estimates, self._cluster, self._work = estimates, estimates.cluster, estimates.work
        self._cell = cell or MOST_CELL
        self._known: dict[Hashable, Hops] = {}

    def of(
        self, shape: Shape, route: Route, roomiest: list[tuple[int, int]]
    ) -> tuple[list[tuple[int, float]], float, float] | None:
        """Return (ranks, seconds from the first rank) in order, and the seconds of the slowest uplink.

        The second value is that uplink's seconds for a micro-batch, the third those of a step for a rank that sends
        in both directions. Ranks that the route does not place are as near as links and the largest sites allow; None
        if these do not suffice.

        Args:
            roomiest: sites with the number of ranks that fit, the largest first.
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

    def hops(self, shape: Shape) -> Hops:
        """Return the hops of all links, with as large a DP-cell as there may be."""
        cell = min(self._cell, shape.replicas) if shape.may_pool else 1
        key = ("hops", shape.gpus_per_rank, shape.microbatch_size, cell)
        if key not in self._known:
            sent = self._work.message_bytes * shape.microbatch_size
            sent_s, held_s, way_s = {}, {}, {}
            for here, there in self._cluster.links:
                link = self._estimates.link_cost(here, there, shape)
                seconds = link.transit_s(sent)
                sent_s[here, there] = sent_s[there, here] = seconds
                held_s[here, there] = held_s[there, here] = link.occupancy_s(sent)
                way_s[here, there] = way_s[there, here] = link.latency_s + seconds / cell
            quickest = sorted(seconds for (here, there), seconds in way_s.items() if here < there)
            self._known[key] = Hops(
                way_s=way_s,
                sent_s=sent_s,
                held_s=held_s,
                quickest_s=list(accumulate(quickest, initial=0.0)),
                least_way_s=_least(way_s),
                least_sent_s=_least(sent_s),
                least_held_s=_least(held_s),
                cell=cell,
            )
        return self._known[key]


def local_s(estimates: Estimates, shape: Shape, bps_of_gpu: float) -> tuple[float, float]:
    """Return the seconds of a micro-batch between ranks of one site: of sending, and until it arrives."""
    link = estimates.local_link(bps_of_gpu, shape)
    sent_s = link.transit_s(estimates.work.message_bytes * shape.microbatch_size)
    return sent_s, link.latency_s + sent_s


def _least(seconds: dict[tuple[int, int], float]) -> dict[int | None, float]:
    """Return the minimum by sending site, and over all sites under None."""
    least: dict[int | None, float] = {}
    for (here, _), one in seconds.items():
        for site in (here, None):
            least[site] = min(least.get(site, one), one)
    return least
