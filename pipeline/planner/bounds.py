"""Lower bounds of a shape's score, for any sites or for a route whose first sites are fixed."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from math import inf

from weft.pipeline.memory import USABLE
from weft.pipeline.planner.crossings import Crossings, local_s
from weft.pipeline.planner.estimates import Estimates, timing_key
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.shapes import site_capacity
from weft.pipeline.planner.sharing import shared_s, spans_of, whole_layers_s
from weft.pipeline.planner.speeds import Speed, Speeds
from weft.pipeline.workload import LayerWork

ANYWHERE = Route((), ())


class Bounds:
    """Lower bounds of the time and cost of steps.

    Args:
        cell: number of replicas of a DP-cell; None means that it is not fixed.
        usable: share of a GPU's memory that may be filled.
    """

    def __init__(self, estimates: Estimates, cell: int | None = None, usable: float = USABLE) -> None:
        self._usable = usable
        self._estimates, self._cluster, self._work = estimates, estimates.cluster, estimates.work
        self._whole = self._work.whole
        self._crossings = Crossings(estimates, cell)
        self.hops = self._crossings.hops
        self.speeds = Speeds(estimates)
        self._memo = estimates.memo
        self._own: Hashable = self._memo.of(("bounds", estimates.known, cell, usable), object)

    def step_s(self, shape: Shape, route: Route = ANYWHERE, max_sites: int = 0, fullest: int = 0) -> float | None:
        """Return the least seconds of a step, or None if GPUs, links or the allowed number of sites do not suffice.

        Args:
            route: the first sites of the pipeline; its remaining ranks may be at any other sites.
            max_sites: maximum number of sites of a pipeline; 0 is no limit.
            fullest: minimum number of layers on the fullest rank.
        """
        key = (self._own, "step", shape, route, max_sites, fullest)
        if key not in self._memo:
            self._memo.add(key, self._step_s(shape, route, max_sites, fullest))
        return self._memo[key]

    def _step_s(self, shape: Shape, route: Route, max_sites: int, fullest: int) -> float | None:
        route = route.last(shape)
        crossing = self._crossings.of(shape, route, self._roomiest(shape))
        if crossing is None or (max_sites and len(crossing[0]) > max_sites):
            return None
        ways_s, uplink_s, sending_s = crossing
        speeds, ranks, count = self.speeds.of(shape), self._ranks(shape, route), shape.microbatches
        least, last_way_s = self._least_of(shape, route), ways_s[-1][1]
        spans, through, gathered, first = [], [], [], 0
        for site, held, way_s in spans_of(ranks, ways_s, len(route.sites)):
            before = first + (held - 1) / 2  # ranks, on average: a layer at least goes through each
            spans.append((held / speeds[site].whole_s, way_s + before * least.layer_forward_s))
            through.append(
                (held / speeds[site].whole_s / least.through_share, 2 * way_s + before * least.layer_through_s)
            )
            first += held
        first = 0  # sites that compute fast may gather slowly
        by_gathering = self._ranks(shape, route, "gathered_s") if least.gathered_s else []
        for site, held, way_s in spans_of(by_gathering, ways_s, len(route.sites)) if by_gathering else ():
            before_s = (first + (held - 1) / 2) * least.layer_forward_s
            gathered.append((held / speeds[site].gathered_s, way_s + before_s))
            first += held
        sent_s, hops_s = self._inside(shape, route, len(ways_s))
        pipeline_s = max(
            count * self.slowest_s(least.layer_s, least.after_s)[min(shape.num_stages, len(self._work.layers))],
            count * fullest * least.layer_s,
            sending_s,
            least.through_s
            + 2 * (shape.crossings * last_way_s + hops_s)
            + max((count - 1 / self.hops(shape).cell) * uplink_s, (count - 1) * sent_s),
            count * shape.crossings * uplink_s,
            shared_s(spans, count),
            shared_s(through, count),
            shared_s(gathered, count) if gathered else 0.0,
            self._crowded_s(shape, route),
        )
        many: dict[float, int] = {}
        for site, held in self._ranks(shape, route, "layer_s"):
            many[speeds[site].layer_s] = many.get(speeds[site].layer_s, 0) + held
        layers_s = [(held, count * layer_s) for layer_s, held in many.items()]
        return whole_layers_s(layers_s, len(self._work.layers), pipeline_s) + least.ends_s

    def completions(self, shape: Shape, route: Route) -> list[tuple[float, float]]:
        """Return (least seconds of a step because of its slowest hop, sum of prices) of ways to complete a route."""
        count = shape.microbatches * shape.crossings
        found = self._crossings.completions(shape, route, self.caps(shape))
        return [(count * sent_s, price) for sent_s, price in found]

    def _inside(self, shape: Shape, route: Route, num_sites: int) -> tuple[float, float]:
        """Return the seconds in which a micro-batch is sent inside a site, and those of all such hops of a forward.

        A hop that may be between sites counts as the faster kind in the second value, and is left out of the first.

        Args:
            num_sites: minimum number of sites of a pipeline.
        """
        sites, caps = self._cluster.sites, self.caps(shape)
        speeds = [sites[site].bps_of_gpu for site in route.sites]
        others = [site.bps_of_gpu for site, cap in zip(sites, caps, strict=True) if cap]
        sent_s, way_s = local_s(self._estimates, shape, min(speeds) if speeds else max(others, default=inf))
        inside, placed = sum(route.stages) - len(route.sites), sum(route.stages)
        if placed == shape.num_stages:
            return sent_s if inside else 0.0, inside * way_s
        left = shape.num_stages - placed - (num_sites - len(route.sites))
        is_sure = inside or shape.num_stages > len(others)
        least_s = min(way_s, self.hops(shape).least_way_s.get(None, way_s))
        return sent_s if is_sure else 0.0, inside * way_s + max(0, left) * least_s

    def together_s(self, whole: Shape) -> tuple[float, float]:
        """Return the seconds in which all GPUs together compute one micro-batch, and the lowest price of its work.

        The price is that of one GPU of a rank with the whole model: its seconds times its hourly price.
        """
        speeds, caps = self.speeds.of(whole), self.caps(whole)
        rate = sum(cap / speeds[site].whole_s for site, cap in enumerate(caps) if cap)
        prices = [self._cluster.sites[site].price * speeds[site].whole_s for site, cap in enumerate(caps) if cap]
        return 1 / rate, min(prices)

    def going_on_s(self, shape: Shape, route: Route, site: int) -> float:
        """Return the least seconds of a step of a pipeline that continues from ``site`` to any other site."""
        hops, route = self.hops(shape), route.last(shape)
        chain = (*route.sites, site) if sum(route.stages) < shape.num_stages else (site,)
        if site not in hops.least_way_s:
            return inf
        way_s = sum(hops.way_s[pair] for pair in pairwise(chain)) + hops.least_way_s[site]
        sent_s = max([hops.least_sent_s[site], *(hops.sent_s[pair] for pair in pairwise(chain))])
        least, count = self._least_of(shape, ANYWHERE), shape.microbatches * shape.crossings
        through_s = least.through_s + 2 * shape.crossings * way_s + (shape.microbatches - 1 / hops.cell) * sent_s
        return max(through_s, count * sent_s) + least.ends_s

    def hop_s(self, shape: Shape, here: int, there: int) -> float:
        """Return the seconds of a micro-batch's hop between two sites, with the largest possible DP-cell."""
        return self.hops(shape).way_s[here, there]

    def slowest_s(self, layer_s: float, after_s: float) -> list[float]:
        """Return, by number of stages, the least seconds for which one micro-batch occupies the slowest rank.

        Args:
            layer_s: seconds of a layer.
            after_s: seconds of the last rank's work after its layers.
        """
        key = (self._own, "slowest", layer_s, after_s)
        if (found := self._memo.get(key)) is None:
            import numpy as np  # takes longer to load than other commands of the pipeline take

            layers = len(self._work.layers)
            stages = np.arange(1, layers + 1)
            # The last rank has fewer layers the more the others have, so the least is where the two are as slow.
            even = np.minimum((layers * layer_s + after_s) / (layer_s * stages), layers).astype(int)
            near = (even + np.arange(-1, 3)[:, None]).clip(1, layers)
            last = np.maximum(1, layers - near * (stages - 1))
            least_s = np.maximum(last * layer_s + after_s, near * layer_s).min(axis=0)
            found = [inf, *least_s.tolist()]
            self._memo.add(key, found)
        return found

    def crowded_s(self, shape: Shape, in_flight: int) -> float:
        """Return the least seconds of a step with ``in_flight`` micro-batches in flight."""
        return shape.microbatches * self._least_of(shape, ANYWHERE).through_s / in_flight

    def held(self, shape: Shape, route: Route) -> float:
        """Return the least sum over layers of the bytes that a micro-batch saves times the seconds that they stay.

        They stay at least while the layer and what is behind it run forward and backward.
        """
        key = (self._own, "saved", shape.checkpointing, shape.microbatch_size, shape.gpus_per_rank)
        if (found := self._memo.get(key)) is None:
            saved = [self._estimates.activation_bytes(layer, 1, shape) for layer in self._work.layers]
            through = sum(each * layers for layers, each in enumerate(reversed(saved), start=1))
            found = through, sum(saved)
            self._memo.add(key, found)
        least, (through, whole) = self._least_of(shape, route), found
        return float(through * least.layer_through_s + whole * least.after_through_s)

    def _crowded_s(self, shape: Shape, route: Route) -> float:
        """Return the least seconds of a step because activations stay in the memory of all ranks together."""
        key = (self._own, "room", shape)
        if (room_bytes := self._memo.get(key)) is None:
            kept = self._estimates.memory(self.part(shape.num_stages), 1, shape).zero.resident
            most = max(site.gpu.memory_bytes for site in self._cluster.sites)
            room_bytes = shape.num_stages * (self._usable * most - kept)
            self._memo.add(key, room_bytes)
        return shape.microbatches * self.held(shape, route) / room_bytes if room_bytes > 0 else 0.0

    def price_seconds(self, shape: Shape, route: Route = ANYWHERE) -> float:
        """Return the sum over GPUs of the hourly price times the seconds for which the GPU computes in a step.

        Any division of the model is allowed: each part has its cost on the cheapest rank.

        Args:
            route: the first sites of the pipelines; the remaining ranks may be at any other sites.
        """
        is_whole, sites, speeds = route.is_whole(shape), self._cluster.sites, self.speeds.of(shape)
        at = route.sites if is_whole else [site for site, cap in enumerate(self.caps(shape)) if cap]
        least = min(sites[site].price * speeds[site].whole_s for site in at)
        return shape.lines * shape.microbatches * least

    def further_across_s(self, shape: Shape, route: Route) -> float:
        """Return the least seconds by which a reduction over the WAN is slower at a route's sites than at the best.

        Only pipeline ranks whose sites are fixed count. Of these, the one with the best links is taken, because it may
        be the fullest. The result is infinite if two sites of any rank have no link.
        """
        if shape.routes == 1:
            return 0.0
        estimates, part = self._estimates, self.part(shape.num_stages)
        sent = estimates.across_bytes(part, shape)
        on = [site for site, held in zip(route.sites, route.stages, strict=True) for _ in range(held)]
        by_rank = {tuple(on[rank :: shape.num_stages]) for rank in range(shape.num_stages)}
        each_s = [
            max((estimates.network.least_from_s(here, at, shape.routes, sent) for here in at), default=0.0)
            for at in by_rank
        ]
        return inf if inf in each_s else max(0.0, min(each_s) - estimates.least_across_s(part, shape))

    def _ranks(self, shape: Shape, route: Route, by: str = "whole_s") -> list[tuple[int, int]]:
        """Return (site, number of ranks) for a route, then for the fastest other sites until all ranks are placed.

        Args:
            by: field of `Speed` by which sites are compared.
        """
        ranks = list(zip(route.sites, route.stages, strict=True))
        left = shape.num_stages - sum(route.stages)
        for site, cap in self._fastest(shape, by):
            if not left:
                break
            if site not in route.sites:
                ranks.append((site, min(cap, left)))
                left -= min(cap, left)
        return ranks

    def part(self, num_stages: int) -> LayerWork:
        """Return the work of a rank that holds an equal share of the model."""
        return self._memo.of((self._own, "part", num_stages), lambda: _share(self._whole, num_stages))

    def caps(self, shape: Shape) -> list[int]:
        """Return, by site, the number of pipeline ranks that it has GPUs for."""
        of = shape.gpus_per_rank, shape.replicas_of_route
        return self._memo.of((self._own, "caps", *of), lambda: site_capacity(self._cluster, *of))

    def _fastest(self, shape: Shape, by: str) -> list[tuple[int, int]]:
        """Return (site, capacity in pipeline ranks), sorted by speed, without sites that have no capacity."""
        key = (self._own, "fastest", by, *timing_key(shape), shape.replicas_of_route)
        if (found := self._memo.get(key)) is None:
            speeds = self.speeds.of(shape)
            held = [(site, cap) for site, cap in enumerate(self.caps(shape)) if cap]
            found = sorted(held, key=lambda one: getattr(speeds[one[0]], by))
            self._memo.add(key, found)
        return found

    def _roomiest(self, shape: Shape) -> list[tuple[int, int]]:
        """Return (site, capacity in pipeline ranks), sorted by capacity, the largest first."""
        key = (self._own, "roomiest", shape.gpus_per_rank, shape.replicas_of_route)
        return self._memo.of(key, lambda: sorted(enumerate(self.caps(shape)), key=lambda one: -one[1]))

    def _least_of(self, shape: Shape, route: Route) -> Speed:
        """Return the minimum of each field of `Speed` over all sites at which ranks may be."""
        caps = self.caps(shape)
        known = sum(route.stages) == shape.num_stages
        sites = route.sites if known else [site for site, cap in enumerate(caps) if cap]
        kinds = frozenset([self.speeds.kinds[site] for site in sites])
        stages = shape.num_stages, shape.replicas, shape.zero_stage, shape.routes
        key = (self._own, "least", kinds, *timing_key(shape), *stages)
        if (least := self._memo.get(key)) is None:
            speeds, part = self.speeds.of(shape), self.part(shape.num_stages)
            found = [speeds[site]._replace(ends_s=self._ends_s(part, shape, site)) for site in kinds]
            least = Speed(*map(min, zip(*found, strict=True)))
            self._memo.add(key, least)
        return least

    def _ends_s(self, part: LayerWork, shape: Shape, number: int) -> float:
        """Return the seconds of collectives over replicas and of the optimiser for a rank that holds ``part``."""
        site = self._cluster.sites[number]
        estimates = self._estimates
        together_s = estimates.collective_s(part, shape, site) + estimates.least_across_s(part, shape)
        return together_s + estimates.optimizer_s(part, shape, site)


def _share(work: LayerWork, parts: int) -> LayerWork:
    return LayerWork(
        parameters=work.parameters // parts,
        expert_parameters=work.expert_parameters // parts,
        trained_parameters=work.trained_parameters // parts,
        trained_expert_parameters=work.trained_expert_parameters // parts,
        whole_parameters=work.whole_parameters // parts,
        matmul_flops=work.matmul_flops / parts,
        trained_flops=work.trained_flops / parts,
        attention_flops=work.attention_flops / parts,
        activation_bytes=work.activation_bytes / parts,
        unrecomputed_bytes=work.unrecomputed_bytes / parts,
        deferred_bytes=work.deferred_bytes / parts,
        routed_bytes=work.routed_bytes / parts,
        routed_layers=work.routed_layers / parts,
    )
