"""The evaluation of layouts: lower bounds first, then a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.pipeline.costs import CostModel
from weft.pipeline.planner.bounds import MOST_CELL, Bounds, busy_s
from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.latency import first_microbatches, latency_bound_s, pipeline_latency
from weft.pipeline.planner.layer_cuts import LayerCuts
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.refusals import Refusals
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.workload import ModelWork
from weft.pipeline.states import RankMemory

NEAR = 1.001
"""Schedules that are longer than their bound by less are not improved."""


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
        self._least_price = min(site.price for site in cluster.sites)
        self._bounds = Bounds(self._estimates, request.pins.get("cell"))
        self._layers = LayerCuts(self._estimates, request.max_memory)
        self.refused = Refusals(cluster, work, request)

    def shape_bound(self, shape: Shape) -> float | None:
        """What no route and no schedule of a shape scores below; None if it fits nowhere."""
        caps = self._bounds.caps(shape)
        sites = [site for site, cap in zip(self._cluster.sites, caps, strict=True) if cap]
        if sum(caps) < shape.num_stages:
            self.refused.gpus()
            return None
        part, held = self._bounds.part(shape.num_stages), max(1, len(self._work.layers) // shape.num_stages)
        memory = self._estimates.memory(part, held, shape, self._estimates.activation_bytes(part, held, shape)).total
        most = self._request.max_memory * max(site.gpu.memory_bytes for site in sites)
        if memory > most:
            self.refused.memory(memory, f"pipeline.stages={shape.num_stages}")
            return None
        price = shape.gpus * min(site.price for site in sites)
        if self._request.max_cost_per_hour and price > self._request.max_cost_per_hour:
            self.refused.price(price)
            return None
        if (step_s := self._bounds.step_s(shape)) is None:
            self.refused.links()
            return None
        return self._request.score_of(step_s, None, price, 0.0, self._tokens(shape))

    def route_bound(self, shape: Shape, route: Route, max_sites: int = 0) -> float | None:
        """What nothing that begins with a route scores below; None if nothing begins so."""
        step_s = self._bounds.step_s(shape, route, max_sites)
        if step_s is None:
            return None
        request, sites = self._request, self._cluster.sites
        left = shape.num_stages - sum(route.stages)
        each = left * self._least_price
        each += sum(held * sites[site].price for site, held in zip(route.sites, route.stages, strict=True))
        price = each * shape.replicas * shape.gpus_per_rank
        if request.max_cost_per_hour and price > request.max_cost_per_hour:
            self.refused.price(price)
            return None
        return request.score_of(step_s, None, price, self._egress(shape, route.sites), self._tokens(shape))

    def candidates(self, shape: Shape, route: Route) -> Iterator[Candidate]:
        """The layouts of a route: one for each size of DP-cell and schedule."""
        request, names = self._request, self._cluster.sites
        on = [site for site, held in zip(route.sites, route.stages, strict=True) for _ in range(held)]
        layers = self._layers.of(shape, [on[rank] for rank in shape.placed(route.stages).stage_ranks])
        if layers is None:
            self.refused.memory()
            return
        price = sum(names[site].price for site in on) * shape.replicas * shape.gpus_per_rank
        if request.max_cost_per_hour and price > request.max_cost_per_hour:
            self.refused.price(price)
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
        saved = [sum(stages[stage].activation_bytes for stage in held) for held in base.placement.single.rank_stages]
        if any(left < each for left, each in zip(rooms, saved, strict=True)):
            self.refused.memory()
            return
        collective_s = max(seconds for _, seconds, _ in parts)
        optimizer_s = max(seconds for _, _, seconds in parts)
        in_flight = [
            rooms[rank] / max(stage.activation_bytes, 1.0)
            for rank, stage in zip(base.placement.stage_ranks, stages, strict=True)
        ]
        egress = self._egress(shape, route.sites)
        for cell in self._cells(base, costs):
            layout = replace(base, cell=cell, connections=tuple(link.streams for _, link in costs.wan_links[::2]))
            for schedule in request.choices("schedule", ["auto"]):
                layout = replace(layout, schedule=schedule)
                if schedule != "auto" and (cell > 1 or len(shape.legs) > 1):
                    continue
                pipeline_s = max(latency_bound_s(one, shape.microbatches, costs, in_flight) for one in layout.cells)
                bound_s = pipeline_s + collective_s + optimizer_s
                yield Candidate(
                    layout=layout,
                    costs=costs,
                    collective_s=collective_s,
                    optimizer_s=optimizer_s,
                    states=states,
                    rooms=rooms,
                    bound_s=bound_s,
                    score_bound=request.score_of(bound_s, layout, price, egress, self._tokens(shape)),
                    actions=3
                    * layout.virtual_stages
                    * sum(one.pipelines for one in layout.cells)
                    * min(shape.microbatches, first_microbatches(layout.virtual_stages)),
                )

    def schedule(self, candidate: Candidate) -> Prediction | None:
        """The prediction of a scheduled layout; None if its schedule exceeds memory."""
        layout = candidate.layout
        cap = min(candidate.rooms)
        enough_s = NEAR * (candidate.bound_s - candidate.collective_s - candidate.optimizer_s)
        cells = [
            pipeline_latency(cell, layout.microbatches, candidate.costs, cap, layout.schedule, enough_s)
            for cell in layout.cells
        ]
        pipeline_s = max(cell.step_s for cell in cells)
        peaks = [
            max(max(cell.peak_bytes[rank :: layout.num_stages]) for cell in cells) for rank in range(layout.num_stages)
        ]
        if any(peak > left for peak, left in zip(peaks, candidate.rooms, strict=True)):
            return None
        memory = [replace(state, activations=peak) for state, peak in zip(candidate.states, peaks, strict=True)]
        totals = [held.total for held in memory]
        on = [self._cluster.sites[site] for site in layout.site_of()]
        shares = [total / site.gpu.memory_bytes for total, site in zip(totals, on, strict=True)]
        fullest = max(range(len(shares)), key=shares.__getitem__)
        ends_s = candidate.collective_s + candidate.optimizer_s
        step_s = max(pipeline_s + ends_s, candidate.bound_s)  # a closed form may come out too short
        tokens = self._tokens(layout)
        peak_flops = sum(site.gpu.flops_per_s for site in on) * layout.replicas * layout.gpus_per_rank
        return Prediction(
            layout=layout,
            step_s=step_s,
            bound_s=candidate.bound_s,
            pipeline_s=pipeline_s,
            collective_s=candidate.collective_s,
            optimizer_s=candidate.optimizer_s,
            busy_s=layout.microbatches * sum(map(busy_s, candidate.costs.stages)) / layout.num_stages,
            tokens=tokens,
            mfu=self._work.flops_per_token * tokens / step_s / peak_flops,
            memory=memory[fullest],
            memory_share=shares[fullest],
            cap_bytes=cap,
            wan_bytes=self._wan_bytes(layout),
            price_per_hour=sum(site.price for site in on) * layout.replicas * layout.gpus_per_rank,
            egress_per_step=self._egress(layout, layout.sites),
            binds=self._binds(candidate, step_s),
        )

    def _cells(self, layout: Layout, costs: CostModel) -> list[int]:
        """Sizes of DP-cells: alone, as many as a transfer takes longer than a forward (Atlas section 4.4), and as
        many cells of that with as even a number each as there can be."""
        if (pinned := self._request.pins.get("cell")) is not None:
            return [pinned] if pinned <= (layout.replicas if layout.may_pool else 1) else []
        if not costs.wan_links or not layout.may_pool:
            return [1]
        forward_s = max(stage.forward_s for stage in costs.stages)
        sent = costs.stages[0].output_bytes
        ratio = max(link.transit_s(sent) for _, link in costs.wan_links) / max(forward_s, 1e-12)
        most = max(1, min(MOST_CELL, layout.replicas, -int(-ratio // 1)))
        even = -(-layout.replicas // -(-layout.replicas // most))
        return sorted({1, most, even})

    # -- parts ---------------------------------------------------------------------------------

    def _tokens(self, shape: Shape) -> int:
        return shape.sequences * self._work.sequence_length

    def _wan_bytes(self, layout: Layout) -> float:
        hops = len(layout.sites) - 1
        return 2 * hops * layout.crossings * self._work.message_bytes * layout.sequences

    def _egress(self, shape: Shape, sites: Sequence[int]) -> float:
        """What the bytes of a step cost that leave sites: activations one way, gradients the other."""
        prices = 0.0
        for here, there in pairwise(sites):
            link = self._cluster.link(here, there)
            assert link is not None
            prices += 2 * link.egress_price
        return prices * shape.crossings * self._work.message_bytes * shape.sequences / 1e9

    def _binds(self, candidate: Candidate, step_s: float) -> str:
        """What holds a layout up most."""
        layout, stages = candidate.layout, candidate.costs.stages
        count = layout.microbatches
        busy = [sum(busy_s(stages[stage]) for stage in held) for held in layout.placement.single.rank_stages]
        shares = {"compute": max(busy) * count}
        for (here, there), link in candidate.costs.wan_links:
            names = [self._cluster.sites[layout.sites[end]].name for end in (here, there)]
            shares[f"uplink {names[0]} to {names[1]}"] = (
                link.occupancy_s(stages[0].output_bytes) * layout.crossings * count
            )
        crossing_s = sum(
            link.latency_s + link.transit_s(stages[0].output_bytes) / layout.cell
            for _, link in candidate.costs.wan_links
        )
        shares["the way through sites"] = crossing_s * layout.crossings
        shares["filling and draining the pipeline"] = (sum(busy) - max(busy)) / len(layout.legs)
        shares["collectives over replicas"] = candidate.collective_s
        most = max(shares, key=lambda name: shares[name])
        return f"{most} ({shares[most] / step_s:.0%} of the step)"
