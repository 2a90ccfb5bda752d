"""The evaluation of layouts: lower bounds first, then a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.planner.cluster import Cluster, Site
from weft.pipeline.planner.cutting import RankSpeed, cut_layers
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.latency import first_microbatches, latency_bound_s, pipeline_latency
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.shapes import room
from weft.pipeline.planner.workload import LayerWork, ModelWork
from weft.pipeline.states import RankMemory
from weft.pipeline.text import bytes_text

NEAR = 1.001
"""Schedules that are longer than their bound by less are not improved."""
MOST_CELL = 8
"""Replicas that are compared as one DP-cell; more is rarely better (Atlas takes communication over compute)."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its costs, before it is scheduled.

    Attributes:
        ends_s: collectives over replicas, and the optimiser's step.
        states: of each rank, without saved activations.
        rooms: bytes for saved activations on each rank.
        actions: that scheduling it takes.
    """

    layout: Layout
    costs: CostModel
    collective_s: float
    optimizer_s: float
    states: tuple[RankMemory, ...]
    rooms: tuple[float, ...]
    bound_s: float
    score_bound: float
    actions: int


class Evaluation:
    """Bounds and predictions of layouts for one request."""

    def __init__(self, cluster: Cluster, work: ModelWork, request: Request) -> None:
        self._cluster, self._work, self._request = cluster, work, request
        self._estimates = Estimates(cluster, work)
        self._known: dict[Any, Any] = {}
        alike = [(site.gpu.name, site.gpus_per_host, site.network_bps, site.price) for site in cluster.sites]
        self._first_alike = [alike.index(kind) for kind in alike]
        self._refused: dict[str, int] = {}
        self._least_bytes = (float("inf"), "")

    def shape_bound(self, shape: Shape) -> float | None:
        """What no route and no schedule of a shape scores below; None if it fits nowhere."""
        caps = self._caps(shape)
        kinds = sorted({first for first, cap in zip(self._first_alike, caps, strict=True) if cap})
        sites = [self._cluster.sites[first] for first in kinds]
        gpus = shape.gpus
        if not sites or sum(caps) < shape.num_stages:
            self._refuse("GPUs: no set of sites has enough")
            return None
        price = gpus * min(site.price for site in sites)
        if self._request.max_cost_per_hour and price > self._request.max_cost_per_hour:
            self._refuse("--max-cost-per-hour: every layout that fits costs more")
            return None
        whole, number = self._whole, len(self._work.layers)
        part = _share(whole, shape.num_stages)
        least = min(self._least(shape, site) for site in sites)
        held = max(1, number // shape.num_stages)
        memory = self._estimates.memory(part, held, shape, self._estimates.activation_bytes(part, held, shape)).total
        most = self._request.max_memory * max(site.gpu.memory_bytes for site in sites)
        if memory > most:
            self._least_bytes = min(self._least_bytes, (memory, f"pipeline.stages={shape.num_stages}"))
            self._refuse("memory: the model does not fit the GPUs")
            return None
        pace_s = self._pace_s(shape, sites)
        path_s = least - self._model_cost(shape, sites, "weight")
        crossed_s, held_s = self._least_crossing(shape)
        ends_s = min(self._ends(part, shape, site) for site in sites)
        fill_s = self._fill_s(shape, path_s, least, self._pace_s(shape, sites, whole=False))
        step_s = max(pace_s * shape.microbatches, path_s + crossed_s, fill_s + crossed_s, held_s) + ends_s
        return self._request.score_of(step_s, None, price, 0.0, self._tokens(shape))

    def candidates(self, shape: Shape, route: Route) -> Iterator[Candidate]:
        """The layouts of a route: one for each size of DP-cell and schedule."""
        request, names = self._request, self._cluster.sites
        on = [site for site, held in zip(route.sites, route.stages, strict=True) for _ in range(held)]
        layers = self._layers(shape, tuple(on))
        if layers is None:
            self._refuse("memory: the model does not fit the GPUs")
            return
        price = sum(names[site].price for site in on) * shape.replicas * shape.gpus_per_rank
        if request.max_cost_per_hour and price > request.max_cost_per_hour:
            self._refuse("--max-cost-per-hour: every layout that fits costs more")
            return
        base = Layout(**vars(shape), sites=route.sites, stages=route.stages, layers=layers)
        estimates = self._estimates
        costs = estimates.costs(base)
        stages = costs.stages
        parts = estimates.of_ranks(
            base,
            lambda work, held, site: (
                estimates.memory(work, held, base),
                estimates.collective_s(work, base, site),
                estimates.optimizer_s(work, base, site),
            ),
        )
        states = tuple(memory for memory, _, _ in parts)
        rooms = tuple(
            state.room(request.max_memory * names[site].gpu.memory_bytes)
            for site, state in zip(on, states, strict=True)
        )
        if any(left < stage.activation_bytes for left, stage in zip(rooms, stages, strict=True)):
            self._refuse("memory: the model does not fit the GPUs")
            return
        collective_s = max(seconds for _, seconds, _ in parts)
        optimizer_s = max(seconds for _, _, seconds in parts)
        in_flight = [left / max(stage.activation_bytes, 1.0) for left, stage in zip(rooms, stages, strict=True)]
        for cell in self._cells(base, costs):
            layout = replace(base, cell=cell, connections=tuple(link.streams for _, link in costs.wan_links[::2]))
            for schedule in request.choices("schedule", ["auto"]):
                layout = replace(layout, schedule=schedule)
                if schedule != "auto" and cell > 1:
                    continue
                bound_s = (
                    latency_bound_s(layout.placement, shape.microbatches, costs, in_flight) + collective_s + optimizer_s
                )
                yield Candidate(
                    layout=layout,
                    costs=costs,
                    collective_s=collective_s,
                    optimizer_s=optimizer_s,
                    states=states,
                    rooms=rooms,
                    bound_s=bound_s,
                    score_bound=request.score_of(bound_s, layout, price, self._egress(layout), self._tokens(shape)),
                    actions=3
                    * layout.num_stages
                    * cell
                    * min(shape.microbatches, first_microbatches(layout.num_stages)),
                )

    def schedule(self, candidate: Candidate) -> Prediction | None:
        """The prediction of a scheduled layout; None if its schedule exceeds memory."""
        layout = candidate.layout
        cap = min(candidate.rooms)
        enough_s = NEAR * (candidate.bound_s - candidate.collective_s - candidate.optimizer_s)
        latency = pipeline_latency(
            layout.placement, layout.microbatches, candidate.costs, cap, layout.schedule, enough_s
        )
        peaks = latency.peak_bytes[: layout.num_stages]
        if any(peak > left for peak, left in zip(peaks, candidate.rooms, strict=True)):
            return None
        memory = [replace(state, activations=peak) for state, peak in zip(candidate.states, peaks, strict=True)]
        totals = [held.total for held in memory]
        on = [self._cluster.sites[site] for site in layout.site_of()]
        shares = [total / site.gpu.memory_bytes for total, site in zip(totals, on, strict=True)]
        fullest = max(range(len(shares)), key=shares.__getitem__)
        ends_s = candidate.collective_s + candidate.optimizer_s
        step_s = max(latency.step_s + ends_s, candidate.bound_s)  # a closed form may come out too short
        tokens = self._tokens(layout)
        peak_flops = sum(site.gpu.flops_per_s for site in on) * layout.replicas * layout.gpus_per_rank
        busy_s = layout.microbatches * sum(map(_busy_s, candidate.costs.stages)) / layout.num_stages
        return Prediction(
            layout=layout,
            step_s=step_s,
            bound_s=candidate.bound_s,
            pipeline_s=latency.step_s,
            collective_s=candidate.collective_s,
            optimizer_s=candidate.optimizer_s,
            busy_s=busy_s,
            tokens=tokens,
            mfu=self._work.flops_per_token * tokens / step_s / peak_flops,
            memory=memory[fullest],
            memory_share=shares[fullest],
            cap_bytes=cap,
            wan_bytes=self._wan_bytes(layout),
            price_per_hour=sum(site.price for site in on) * layout.replicas * layout.gpus_per_rank,
            egress_per_step=self._egress(layout),
            binds=self._binds(candidate, step_s),
        )

    def nothing_fits(self, num_shapes: int) -> str:
        """Why there is no plan, and what to change."""
        if not self._refused:
            return (
                "no layout: the pinned fields, the batch and the GPUs go with no layout; loosen --pin, or choose a "
                "--batch-tokens that more numbers of replicas divide"
            )
        reason = max(self._refused, key=lambda name: self._refused[name])
        if reason.startswith("memory"):
            least, where = self._least_bytes
            most = max(site.gpu.memory_bytes for site in self._cluster.sites) * self._request.max_memory
            need = f"at best {bytes_text(least)} on a GPU ({where})" if where else "its layers take more"
            return (
                f"{reason}: {need}, and a plan fills {bytes_text(most)}; add GPUs or choose ones with more memory, "
                "raise --max-memory, or free a pinned field"
            )
        return f"{reason}; loosen it, or add GPUs"

    # -- what a route takes ------------------------------------------------------------------

    def _layers(self, shape: Shape, on: tuple[int, ...]) -> tuple[int, ...] | None:
        kinds = [(self._cluster.sites[site].gpu.name, self._cluster.sites[site].gpus_per_host) for site in on]
        key = ("layers", tuple(kinds), self._key(shape), shape.replicas)
        if key not in self._known:
            last = len(on) - 1
            ranks = []
            for rank, number in enumerate(on):
                site = self._cluster.sites[number]
                sums, before_s, after_s = self._layer_seconds(shape, site)
                extra_s = (before_s if rank == 0 else 0.0) + (after_s if rank == last else 0.0)
                most = self._most_layers(shape, site, first=rank == 0, last=rank == last)
                ranks.append(RankSpeed(sums, extra_s, most))
            self._known[key] = cut_layers(len(self._work.layers), ranks)
        return self._known[key]

    def _layer_seconds(self, shape: Shape, site: Site) -> tuple[list[float], float, float]:
        """Sums of seconds over the layers before each, and those of what comes before and after all."""
        key = ("seconds", self._key(shape), site.gpu.name, site.gpus_per_host, site.network_bps)
        if key not in self._known:

            def seconds(work: LayerWork, number: int) -> float:
                return _busy_s(self._estimates.stage_cost(work, number, shape, site))

            each = [seconds(layer, 1) for layer in self._work.layers]
            self._known[key] = (
                list(accumulate(each, initial=0.0)),
                seconds(self._work.before, 0),
                seconds(self._work.after, 0),
            )
        return self._known[key]

    def _most_layers(self, shape: Shape, site: Site, *, first: bool, last: bool) -> int:
        """Layers for whose states and one micro-batch a rank has memory."""
        key = ("most", self._key(shape), shape.replicas, shape.zero_stage, site.gpu.name, first, last)
        if key not in self._known:
            estimates, number = self._estimates, len(self._work.layers)
            most = self._request.max_memory * site.gpu.memory_bytes

            def fits(count: int) -> bool:
                work = estimates.rank_work(range(number - count, number), first=first, last=last)
                activations = estimates.activation_bytes(work, count, shape)
                return estimates.memory(work, count, shape, activations).total <= most

            low, high = 0, number
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if fits(middle) else (low, middle - 1)
            self._known[key] = low
        return self._known[key]

    def _cells(self, layout: Layout, costs: CostModel) -> list[int]:
        """Sizes of DP-cells: alone, and as many as a transfer takes longer than a forward (Atlas section 4.4)."""
        if "cell" in self._request.pins:
            return [self._request.pins["cell"]] if self._request.pins["cell"] <= layout.replicas else []
        if not costs.wan_links or layout.replicas == 1:
            return [1]
        forward_s = max(stage.forward_s for stage in costs.stages)
        sent = costs.stages[0].output_bytes
        ratio = max(link.transit_s(sent) for _, link in costs.wan_links) / max(forward_s, 1e-12)
        return sorted({1, max(1, min(MOST_CELL, layout.replicas, -int(-ratio // 1)))})

    # -- bounds of shapes ---------------------------------------------------------------------

    def _pace_s(self, shape: Shape, sites: list[Site], *, whole: bool = True) -> float:
        """Seconds per micro-batch of the busiest rank on the fastest GPUs, of ``whole`` layers or any share."""
        key = ("pace", self._key(shape), shape.num_stages, shape.replicas, whole)
        if key not in self._known:
            slots = sorted(
                (self._least(shape, site), cap)
                for site, cap in zip(self._cluster.sites, self._caps(shape), strict=True)
                if cap
            )
            left, speed = shape.num_stages, 0.0
            for seconds, cap in slots:
                speed += min(cap, left) / seconds
                left -= min(cap, left)
            pace_s = 1 / speed
            if whole and slots[0][0] == slots[-1][0]:
                sums, _, _ = self._layer_seconds(shape, sites[0])
                held = -(-len(self._work.layers) // shape.num_stages)
                pace_s = max(pace_s, held * self._shortest_layer(shape, sites[0], sums))
            self._known[key] = pace_s
        return self._known[key]

    def _shortest_layer(self, shape: Shape, site: Site, sums: list[float]) -> float:
        key = ("shortest", self._key(shape), site.gpu.name, site.gpus_per_host, site.network_bps)
        if key not in self._known:
            self._known[key] = min(stop - start for start, stop in pairwise(sums))
        return self._known[key]

    def _fill_s(self, shape: Shape, path_s: float, whole_s: float, pace_s: float) -> float:
        """A step by its last rank, which begins when a micro-batch has come through, and ends when one has gone back.

        If that rank holds a share x of the model, the step takes (1 - x) path + M x whole; the
        others have the rest, and take at least M (1 - x) pace. The least of both is where they meet.
        """
        count = shape.microbatches
        share = (count * pace_s - path_s) / (count * whole_s - path_s + count * pace_s)
        return path_s if share <= 0 else (1 - share) * path_s + share * count * whole_s

    def _least(self, shape: Shape, site: Site) -> float:
        """Seconds of a micro-batch on one rank of a site that holds the whole model."""
        sums, before_s, after_s = self._layer_seconds(shape, site)
        return sums[-1] + before_s + after_s

    def _model_cost(self, shape: Shape, sites: list[Site], what: str) -> float:
        """The most seconds that weight gradients take on any of the sites."""
        return max(self._estimates.stage_cost(self._whole, 0, shape, site).weight_s for site in sites)

    def _least_crossing(self, shape: Shape) -> tuple[float, float]:
        """Seconds that a micro-batch at least spends between sites, and for which a step holds the busiest uplink."""
        left, hops = shape.num_stages, -1
        for cap in sorted(self._caps(shape), reverse=True):
            if left > 0:
                left, hops = left - cap, hops + 1
        if hops <= 0 or not self._cluster.links:
            return 0.0, 0.0
        key = ("crossing", shape.gpus_per_rank)
        if key not in self._known:
            links = [self._estimates.link_cost(*pair, shape) for pair in self._cluster.links]
            self._known[key] = (
                min(link.latency_s for link in links),
                max(min(link.bandwidth_bps, link.pair_bps) for link in links),
                max(link.bandwidth_bps for link in links),
            )
        latency_s, bandwidth, uplink = self._known[key]
        bits = self._work.message_bytes * shape.microbatch_size * 8
        cell = min(MOST_CELL, shape.replicas)
        both = 2 if hops > 1 and max(self._caps(shape)) == 1 else 1  # one rank at each site sends both ways
        return 2 * hops * (latency_s + bits / bandwidth / cell), bits / uplink * shape.microbatches * both

    def _ends(self, part: LayerWork, shape: Shape, site: Site) -> float:
        return self._estimates.collective_s(part, shape, site) + self._estimates.optimizer_s(part, shape, site)

    # -- parts ---------------------------------------------------------------------------------

    def _caps(self, shape: Shape) -> list[int]:
        key = ("caps", shape.gpus_per_rank, shape.replicas)
        if key not in self._known:
            self._known[key] = room(self._cluster, shape.gpus_per_rank, shape.replicas)
        return self._known[key]

    @property
    def _whole(self) -> LayerWork:
        if "whole" not in self._known:
            self._known["whole"] = self._work.whole
        return self._known["whole"]

    def _key(self, shape: Shape) -> tuple[Any, ...]:
        """What the time of a layer depends on."""
        gathered_over = shape.replicas if shape.zero_stage == 3 else 0
        return (
            shape.tensor,
            shape.context,
            shape.expert,
            shape.microbatch_size,
            shape.checkpointing,
            gathered_over,
        )

    def _tokens(self, shape: Shape) -> int:
        return shape.sequences * self._work.sequence_length

    def _wan_bytes(self, layout: Layout) -> float:
        hops = len(layout.sites) - 1
        return 2 * hops * self._work.message_bytes * layout.sequences

    def _egress(self, layout: Layout) -> float:
        """What the bytes of a step cost that leave sites: activations one way, gradients the other."""
        prices = 0.0
        for here, there in pairwise(layout.sites):
            link = self._cluster.link(here, there)
            assert link is not None
            prices += 2 * link.egress_price
        return prices * self._work.message_bytes * layout.sequences / 1e9

    def _binds(self, candidate: Candidate, step_s: float) -> str:
        """What holds a layout up most."""
        layout, stages = candidate.layout, candidate.costs.stages
        count = layout.microbatches
        shares = {"compute": max(map(_busy_s, stages)) * count}
        for (here, there), link in candidate.costs.wan_links:
            names = [self._cluster.sites[layout.sites[end]].name for end in (here, there)]
            shares[f"uplink {names[0]} to {names[1]}"] = link.occupancy_s(stages[0].output_bytes) * count
        crossing_s = sum(
            link.latency_s + link.transit_s(stages[0].output_bytes) / layout.cell
            for _, link in candidate.costs.wan_links
        )
        shares["the way through sites"] = crossing_s
        shares["filling and draining the pipeline"] = sum(map(_busy_s, stages)) - max(map(_busy_s, stages))
        shares["collectives over replicas"] = candidate.collective_s
        most = max(shares, key=lambda name: shares[name])
        return f"{most} ({shares[most] / step_s:.0%} of the step)"

    def _refuse(self, reason: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1


def _busy_s(stage: StageCost) -> float:
    return stage.forward_s + stage.input_s + stage.weight_s


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
    )
