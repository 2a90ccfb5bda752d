"""What no schedule of a shape beats, wherever it lies, or where the first sites of its route are given."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import MOST_CELL
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.shapes import room
from weft.pipeline.planner.speeds import Speed, Speeds, timing_key
from weft.pipeline.planner.workload import LayerWork
from weft.pipeline.states import USABLE

ANYWHERE = Route((), ())


@dataclass(frozen=True)
class _Hops:
    """Seconds of a micro-batch between sites.

    Attributes:
        way_s: of each hop; ``sent_s`` until it has left, one pair of hosts at a time, and ``held_s`` for which the
            uplink is held.
        quickest_s: of so many of the quickest hops together.
        cell: replicas that pool their uplinks at most: each sends one after the other, so much faster.
        least_way_s: of the quickest hop from a site, or from any (None); ``least_sent_s`` and ``least_held_s`` alike.
    """

    way_s: dict[tuple[int, int], float]
    sent_s: dict[tuple[int, int], float]
    held_s: dict[tuple[int, int], float]
    quickest_s: list[float]
    least_way_s: dict[int | None, float]
    least_sent_s: dict[int | None, float]
    least_held_s: dict[int | None, float]
    cell: int


class Bounds:
    """Lower bounds of steps.

    Args:
        cell: replicas of a DP-cell, where it is fixed.
        usable: share of a GPU's memory.
    """

    def __init__(self, estimates: Estimates, cell: int | None = None, usable: float = USABLE) -> None:
        self._usable = usable
        self._estimates, self._cluster, self._work = estimates, estimates.cluster, estimates.work
        self._whole = self._work.whole
        self._cell = cell or MOST_CELL
        self._speeds = Speeds(estimates)
        self._known: dict[Hashable, Any] = {}

    def step_s(self, shape: Shape, route: Route = ANYWHERE, max_sites: int = 0) -> float | None:
        """Seconds of a step; None if GPUs, links or so many sites do not suffice.

        Args:
            route: how the pipeline begins; ranks that it leaves may lie at any other sites.
            max_sites: of a pipeline; 0 is no limit.
        """
        route = route.last(shape)
        crossing = self._crossing(shape, route)
        if crossing is None or (max_sites and len(crossing[0]) > max_sites):
            return None
        ways_s, uplink_s, sending_s = crossing
        speeds, ranks, count = self._speeds.of(shape), self._ranks(shape, route), shape.microbatches
        least, last_way_s = self._least_of(shape, route), ways_s[-1][1]
        spans, through, first = [], [], 0
        for site, held, way_s in _spans(ranks, ways_s, len(route.sites)):
            before = first + (held - 1) / 2  # ranks, on average: a layer at least goes through each
            spans.append((held / speeds[site].whole_s, way_s + before * least.layer_forward_s))
            through.append(
                (held / speeds[site].whole_s / least.through_share, 2 * way_s + before * least.layer_through_s)
            )
            first += held
        pipeline_s = max(
            count * self._slowest_s(least, shape.num_stages),
            sending_s,
            least.through_s + 2 * shape.crossings * last_way_s + (count - 1 / self._hops(shape).cell) * uplink_s,
            count * shape.crossings * uplink_s,
            _shared_s(spans, count),
            _shared_s(through, count),
            count * self._layers_held(shape) * least.layer_through_s,
        )
        return pipeline_s + least.ends_s

    def family_s(self, family: Shape, stages: int) -> float:
        """Seconds that no step of a family's shapes takes less than that have so many stages, or fewer.

        Layouts of more ranks than any site has room for cross a link at least; that is for so many stages alone.
        """
        key = ("family", *timing_key(replace(family, zero_stage=1)), family.replicas_of_route)
        if key not in self._known:
            speeds, caps = self._speeds.of(replace(family, zero_stage=1)), self.caps(family)
            held = [speeds[site] for site, cap in enumerate(caps) if cap]
            self._known[key] = Speed(*map(min, zip(*held, strict=True))), max(caps)
        least, most = self._known[key]
        count, hops = family.microbatches, self._hops(family) if stages > most else None
        sent_s = hops.least_sent_s.get(None, inf) if hops else 0.0
        through_s = least.through_s + (2 * hops.least_way_s.get(None, inf) if hops else 0.0)
        slowest_s = max(self._slowest_s(least, stages), least.whole_s / stages, sent_s)
        across_s = self._estimates.least_across_s(self.part(stages), family)
        return max(count * slowest_s, through_s + (count - (1 / hops.cell if hops else 1)) * sent_s) + across_s

    def most_stages(self, family: Shape) -> int:
        """Stages that the roomiest site has room for."""
        return max(self.caps(family))

    def together_s(self, whole: Shape) -> tuple[float, float]:
        """Seconds in which all GPUs share the work of one micro-batch, and the least price of it, of a GPU."""
        speeds, caps = self._speeds.of(whole), self.caps(whole)
        rate = sum(cap / speeds[site].whole_s for site, cap in enumerate(caps) if cap)
        prices = [self._cluster.sites[site].price * speeds[site].whole_s for site, cap in enumerate(caps) if cap]
        return 1 / rate, min(prices)

    def going_on_s(self, shape: Shape, route: Route, site: int) -> float:
        """Seconds of a step of a pipeline that goes on from a site of its route to another."""
        hops, route = self._hops(shape), route.last(shape)
        chain = (*route.sites, site) if sum(route.stages) < shape.num_stages else (site,)
        if site not in hops.least_way_s:
            return inf
        way_s = sum(hops.way_s[pair] for pair in pairwise(chain)) + hops.least_way_s[site]
        sent_s = max([hops.least_sent_s[site], *(hops.sent_s[pair] for pair in pairwise(chain))])
        least, count = self._least_of(shape, ANYWHERE), shape.microbatches * shape.crossings
        through_s = least.through_s + 2 * shape.crossings * way_s + (shape.microbatches - 1 / hops.cell) * sent_s
        return max(through_s, count * sent_s) + least.ends_s

    def hop_s(self, shape: Shape, here: int, there: int) -> float:
        """Seconds of a micro-batch between two sites, with as large a DP-cell as there may be."""
        return self._hops(shape).way_s[here, there]

    def _slowest_s(self, least: Speed, num_stages: int) -> float:
        """What a micro-batch takes at least on the rank that takes longest, if each layer takes the least of any."""
        num_stages = min(num_stages, len(self._work.layers))
        key = ("slowest", least.layer_s, least.after_s, num_stages)
        if key not in self._known:
            layers, found = len(self._work.layers), inf
            for last in range(1, layers - num_stages + 2):
                others = -(-(layers - last) // (num_stages - 1)) if num_stages > 1 else 0
                if others * least.layer_s < found and (num_stages > 1 or last == layers):
                    found = min(found, max(last * least.layer_s + least.after_s, others * least.layer_s))
            self._known[key] = found
        return self._known[key]

    def crowded_s(self, shape: Shape, in_flight: int) -> float:
        """A step in which so many micro-batches at a time are on their way through the whole model and back."""
        return shape.microbatches * self._least_of(shape, ANYWHERE).through_s / in_flight

    def _layers_held(self, shape: Shape) -> float:
        """For how many layers' time a micro-batch has the memory of all ranks to itself, on average.

        What a layer saves stays at least while the layers behind it go forward and back, whichever ranks hold them.
        """
        key = ("held", shape)
        if key not in self._known:
            kept = self._estimates.memory(self.part(shape.num_stages), 1, shape).zero.kept
            most = max(site.gpu.memory_bytes for site in self._cluster.sites)
            room = shape.num_stages * (self._usable * most - kept)
            self._known[key] = self._bytes_held(shape) / room if room > 0 else 0.0
        return self._known[key]

    def _bytes_held(self, shape: Shape) -> float:
        """What each layer saves of a micro-batch, times the layers behind it."""
        key = ("bytes held", shape.checkpointing, shape.microbatch_size, shape.gpus_per_rank)
        if key not in self._known:
            saved = [self._estimates.activation_bytes(layer, 1, shape) for layer in self._work.layers]
            self._known[key] = sum(each * behind for behind, each in enumerate(reversed(saved)))
        return self._known[key]

    def price_seconds(self, shape: Shape, route: Route = ANYWHERE) -> float:
        """Prices of GPUs per hour times the seconds for which they compute in a step, together.

        Ranks may share the model out as they like: each part of it costs what it costs where that is least.

        Args:
            route: how the pipelines begin; ranks that it leaves may lie at any other sites.
        """
        is_whole, sites, speeds = route.is_whole(shape), self._cluster.sites, self._speeds.of(shape)
        at = route.sites if is_whole else [site for site, cap in enumerate(self.caps(shape)) if cap]
        least = min(sites[site].price * speeds[site].whole_s for site in at)
        return shape.lines * shape.microbatches * least

    def further_across_s(self, shape: Shape, route: Route) -> float:
        """What replicas at the sites of a route take longer to reduce over the WAN than at the best sites, at least.

        Of pipeline ranks whose sites are known, it counts the one with the best links: it may be the fullest.
        """
        if shape.routes == 1:
            return 0.0
        estimates, part = self._estimates, self.part(shape.num_stages)
        sent = estimates.across_bytes(part, shape)
        on = [site for site, held in zip(route.sites, route.stages, strict=True) for _ in range(held)]
        by_rank = {tuple(on[rank :: shape.num_stages]) for rank in range(shape.num_stages)}
        least_s = min(
            max((estimates.least_across_from_s(here, at, shape.routes, sent) for here in at), default=0.0)
            for at in by_rank
        )
        return max(0.0, least_s - estimates.least_across_s(part, shape))

    def _ranks(self, shape: Shape, route: Route) -> list[tuple[int, int]]:
        """Sites and how many ranks: those of a route, then the fastest others."""
        ranks = list(zip(route.sites, route.stages, strict=True))
        left = shape.num_stages - sum(route.stages)
        for site, cap in self._fastest(shape):
            if not left:
                break
            if site not in route.sites:
                ranks.append((site, min(cap, left)))
                left -= min(cap, left)
        return ranks

    def part(self, num_stages: int) -> LayerWork:
        """What some rank has at least."""
        key = ("part", num_stages)
        if key not in self._known:
            self._known[key] = _share(self._whole, num_stages)
        return self._known[key]

    def caps(self, shape: Shape) -> list[int]:
        """Pipeline ranks that each site has room for."""
        key = ("caps", shape.gpus_per_rank, shape.replicas_of_route)
        if key not in self._known:
            self._known[key] = room(self._cluster, shape.gpus_per_rank, shape.replicas_of_route)
        return self._known[key]

    def _fastest(self, shape: Shape) -> list[tuple[int, int]]:
        """Sites with their room, the fastest first."""
        key = ("fastest", *timing_key(shape), shape.replicas_of_route)
        if key not in self._known:
            speeds = self._speeds.of(shape)
            held = [(site, cap) for site, cap in enumerate(self.caps(shape)) if cap]
            self._known[key] = sorted(held, key=lambda one: speeds[one[0]].whole_s)
        return self._known[key]

    def _crossing(self, shape: Shape, route: Route) -> tuple[list[tuple[int, float]], float, float] | None:
        """How many ranks lie how many seconds from the first, in order; seconds of a micro-batch on the slowest
        uplink; and of a step for a rank that sends both ways.

        Ranks that a route leaves are as near as links and the roomiest sites allow. None where these do not suffice.
        """
        known = self._hops(shape)
        sent_s = [known.sent_s[hop] for hop in pairwise(route.sites)]
        ways_s = list(accumulate((known.way_s[hop] for hop in pairwise(route.sites)), initial=0.0))
        chain = list(zip(route.stages, ways_s, strict=False))
        here = route.sites[-1] if route.sites else None
        left, further = shape.num_stages - sum(route.stages), -1 if here is None else 0
        for site, cap in self._roomiest(shape):
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
        most = self._roomiest(shape)[0][1]
        sending_s = 0.0
        for site, (before_s, after_s) in enumerate(pairwise(held_s), start=1):
            held, way_s = chain[site]
            if held == 1 and (site < len(route.sites) or most == 1):
                each_s = shape.crossings * (before_s + after_s)
                sending_s = max(sending_s, shape.microbatches * each_s - before_s + 2 * way_s)
        return chain, max(sent_s, default=0.0), sending_s

    def _roomiest(self, shape: Shape) -> list[tuple[int, int]]:
        """Sites with their room, the roomiest first."""
        key = ("roomiest", shape.gpus_per_rank, shape.replicas_of_route)
        if key not in self._known:
            self._known[key] = sorted(enumerate(self.caps(shape)), key=lambda one: -one[1])
        return self._known[key]

    def _hops(self, shape: Shape) -> _Hops:
        """Of all links, with as large a DP-cell as there may be."""
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
            self._known[key] = _Hops(
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

    def _least_of(self, shape: Shape, route: Route) -> Speed:
        """The least of any site that ranks may lie at, figure by figure."""
        caps = self.caps(shape)
        known = sum(route.stages) == shape.num_stages
        sites = route.sites if known else [site for site, cap in enumerate(caps) if cap]
        kinds = frozenset([self._speeds.kinds[site] for site in sites])
        key = ("least", kinds, *timing_key(shape), shape.num_stages, shape.replicas, shape.zero_stage, shape.routes)
        if key not in self._known:
            speeds, part = self._speeds.of(shape), self.part(shape.num_stages)
            found = [speeds[site]._replace(ends_s=self._ends_s(part, shape, site)) for site in kinds]
            self._known[key] = Speed(*map(min, zip(*found, strict=True)))
        return self._known[key]

    def _ends_s(self, part: LayerWork, shape: Shape, number: int) -> float:
        """Collectives over replicas and the optimiser, of a rank with as much as all have on average."""
        site = self._cluster.sites[number]
        estimates = self._estimates
        together_s = estimates.collective_s(part, shape, site) + estimates.least_across_s(part, shape)
        return together_s + estimates.optimizer_s(part, shape, site)


def _least(seconds: dict[tuple[int, int], float]) -> dict[int | None, float]:
    """By the site that hops leave, and None for any."""
    least: dict[int | None, float] = {}
    for (here, _), one in seconds.items():
        for site in (here, None):
            least[site] = min(least.get(site, one), one)
    return least


def _spans(
    ranks: list[tuple[int, int]], ways_s: list[tuple[int, float]], given: int
) -> Iterator[tuple[int, int, float]]:
    """Sites, ranks and the way to them: the first ``given`` sites as they are, of others the fastest are nearest."""
    for (site, held), (_, way_s) in zip(ranks[:given], ways_s, strict=False):
        yield site, held, way_s
    ways, room, way_s = iter(ways_s[given:]), 0, 0.0
    for site, held in ranks[given:]:
        while held:
            if not room:
                room, way_s = next(ways)
            together = min(held, room)
            yield site, together, way_s
            held, room = held - together, room - together


def _shared_s(spans: list[tuple[float, float]], count: int) -> float:
    """A step in which ranks share all work, each from when a micro-batch can have reached it.

    Args:
        spans: models per second of some ranks, and seconds that these cannot work.
    """
    rate, lost, step_s = 0.0, 0.0, float("inf")
    for speed, off_s in spans:  # the nearest first
        if off_s >= step_s:
            break
        rate += speed
        lost += speed * off_s
        step_s = (count + lost) / rate
    return step_s


def _share(work: LayerWork, parts: int) -> LayerWork:
    """One of so many equal parts."""
    return LayerWork(
        parameters=work.parameters // parts,
        expert_parameters=work.expert_parameters // parts,
        matmul_flops=work.matmul_flops / parts,
        attention_flops=work.attention_flops / parts,
        activation_bytes=work.activation_bytes / parts,
        unrecomputed_bytes=work.unrecomputed_bytes / parts,
        routed_bytes=work.routed_bytes / parts,
        routed_layers=work.routed_layers / parts,
    )
