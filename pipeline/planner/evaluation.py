"""The evaluation of layouts: lower bounds first, then a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from weft.pipeline.costs import CostModel
from weft.pipeline.planner.bounds import Bounds
from weft.pipeline.planner.cluster import Cluster, Link
from weft.pipeline.planner.cuts import Cuts
from weft.pipeline.planner.estimates import Estimates, reduced_bytes
from weft.pipeline.planner.latency import first_microbatches, latency_bound_s, pipeline_latency
from weft.pipeline.planner.layout import Layout, Prediction, Shape
from weft.pipeline.planner.refusals import Refusals
from weft.pipeline.planner.request import MOST_CELL, Objective, Request
from weft.pipeline.planner.routes import FEW_SITES, Route
from weft.pipeline.planner.shapes import Degrees
from weft.pipeline.planner.speeds import busy_s
from weft.pipeline.planner.workload import LayerWork, ModelWork
from weft.pipeline.states import RankMemory

STARTING = 200
"""Actions whose scheduling takes as long as the preparation for any."""
NEAR = 1.001
"""Schedules that are longer than their bound by less are not improved."""


@dataclass(frozen=True)
class _Costed:
    """A layout with its costs.

    Attributes:
        costs: of one pipeline, on each route.
        states: of each rank, without saved activations.
        rooms: bytes for saved activations on each rank, at the site that has least.
        collective_s: collectives over replicas.
    """

    layout: Layout
    costs: tuple[CostModel, ...]
    states: tuple[RankMemory, ...]
    rooms: tuple[float, ...]
    collective_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True)
class Candidate(_Costed):
    """The same with a schedule and a DP-cell, before it is scheduled.

    Attributes:
        actions: that scheduling it takes.
    """

    bound_s: float
    score_bound: float
    actions: int


class Evaluation:
    """Bounds and predictions of layouts for one request."""

    def __init__(self, cluster: Cluster, work: ModelWork, request: Request) -> None:
        self._cluster, self._work, self._request = cluster, work, request
        self._estimates = Estimates(cluster, work)
        self._least_price = min(site.price for site in cluster.sites)
        self._bounds = Bounds(self._estimates, request.pins.get("cell"), request.max_memory)
        self._cuts = Cuts(self._estimates, request.max_memory, self._bounds.hop_s)
        self._predicted: dict[Layout, Prediction | None] = {}
        self.refused = Refusals(cluster, work, request)

    def degrees_bound(self, degrees: Degrees) -> float:
        """What no layout of these degrees scores below: all GPUs share all work, and nothing else takes time."""
        gpus, size = degrees.gpus_per_rank, self._request.sequences
        whole = Shape(num_stages=1, replicas=1, microbatches=1, microbatch_size=size or 1024, **degrees._asdict())
        step_s, price_seconds = self._bounds.together_s(whole)
        tokens = self._tokens(whole)
        if self._request.objective is Objective.latency and not size:
            return 0.0
        return self._request.bound_of(step_s, 0.0, price_seconds * gpus, 0.0, tokens)

    def family_bound(self, family: Shape, stages: int) -> float:
        """What shapes of a family score at least that have so many stages, or fewer in as many sites as it takes."""
        price, paid = family.lines * self._least_price, self._bounds.price_seconds(family)
        step_s = self._bounds.family_s(family, stages)
        return self._request.bound_of(step_s, price, paid, 0.0, self._tokens(family))

    def most_stages(self, family: Shape) -> int:
        """Stages that a site has room for."""
        return self._bounds.most_stages(family)

    def going_on_bound(self, shape: Shape, route: Route | None, site: int) -> float:
        """What a pipeline scores at least that goes on from a site of a route to another, wherever that is."""
        step_s = self._bounds.going_on_s(shape, route or Route((), ()), site)
        if step_s == inf:
            return inf
        paid, price = self._bounds.price_seconds(shape), shape.gpus * self._least_price
        return self._request.bound_of(step_s, price, paid, 0.0, self._tokens(shape))

    def shape_bound(self, shape: Shape) -> float | None:
        """What no route and no schedule of a shape scores below; None if it fits nowhere."""
        caps = self._bounds.caps(shape)
        sites = [site for site, cap in zip(self._cluster.sites, caps, strict=True) if cap]
        if sum(caps) < shape.num_stages * shape.routes:
            self.refused.gpus()
            return None
        part, held = self._even_part(shape)
        memory = self._estimates.memory(part, held, shape, self._estimates.activation_bytes(part, held, shape)).total
        most = self._request.max_memory * max(site.gpu.memory_bytes for site in sites)
        if memory > most:
            self.refused.memory(memory, f"pipeline.stages={shape.num_stages}")
            return None
        price = shape.gpus * min(site.price for site in sites)
        if self._request.max_cost_per_hour and price > self._request.max_cost_per_hour:
            self.refused.price(price)
            return None
        if (step_s := self._bounds.step_s(shape)) in (None, inf):
            self.refused.links()
            return None
        return self._request.bound_of(step_s, price, self._bounds.price_seconds(shape), 0.0, self._tokens(shape))

    def crowding(self, shape: Shape) -> float:
        """How many times its bound a step is expected to take, because memory has room for few micro-batches.

        If all ranks hold as many layers, the first has room for some micro-batches on their way and back. Other cuts
        may do better, so this proves nothing; the search looks first where it is low.
        """
        part, held = self._even_part(shape)
        most = self._request.max_memory * max(site.gpu.memory_bytes for site in self._cluster.sites)
        room = self._estimates.memory(part, held, shape).room(most)
        in_flight = max(1, int(room / max(self._estimates.activation_bytes(part, held, shape), 1.0)))
        step_s = self._bounds.step_s(shape)
        return max(1.0, self._bounds.crowded_s(shape, in_flight) / step_s) if step_s else 1.0

    def _even_part(self, shape: Shape) -> tuple[LayerWork, int]:
        """What a rank has if all have as much, and how many layers."""
        return self._bounds.part(shape.num_stages), max(1, len(self._work.layers) // shape.num_stages)

    def across_bound(self, shape: Shape) -> float:
        """What a shape scores at least because its replicas, at different sites, reduce over the WAN."""
        across_s = self._estimates.least_across_s(self._bounds.part(shape.num_stages), shape)
        price = shape.gpus * self._least_price
        return self._request.score_of(across_s, None, price, 0.0, self._tokens(shape))

    def sites_of_several(self) -> int:
        """Sites of a pipeline, where replicas have routes of their own; among many sites whole pipelines in one."""
        return self._request.max_sites if len(self._cluster.sites) <= FEW_SITES else 1

    def route_bound(self, shape: Shape, route: Route, max_sites: int = 0) -> float | None:
        """What nothing that begins with a route scores below; None if nothing begins so."""
        step_s = self._bounds.step_s(shape, route, max_sites)
        if step_s is None:
            return None
        request, sites = self._request, self._cluster.sites
        left = shape.num_stages * shape.routes - sum(route.stages)
        each = left * self._least_price
        each += sum(held * sites[site].price for site, held in zip(route.sites, route.stages, strict=True))
        price = each * shape.lines_of_route
        if request.max_cost_per_hour and price > request.max_cost_per_hour:
            self.refused.price(price)
            return None
        step_s += self._bounds.further_across_s(shape, route)
        if step_s == inf:
            self.refused.links()
            return None
        paid, egress = self._bounds.price_seconds(shape, route), self._egress(shape, route)
        return request.bound_of(step_s, price, paid, egress, self._tokens(shape))

    def cuts_bound(self, shape: Shape, route: Route) -> float:
        """What no cut of a whole route and no schedule of it scores below; infinite where none fits the memory."""
        step_s = self._cuts.of(self._empty(shape, route)).step_s
        if step_s == inf:
            self.refused.memory()
            return inf
        return self._request.score_of(
            step_s, None, self._price(shape, route), self._egress(shape, route), self._tokens(shape)
        )

    def candidates(
        self, shape: Shape, route: Route, cuts: Iterable[tuple[int, ...]] | None = None
    ) -> Iterator[Candidate]:
        """The layouts of a route: one for each size of DP-cell and schedule.

        Args:
            cuts: layers by virtual stage; None takes those whose slowest rank is the fastest.
        """
        price, empty = self._price(shape, route), self._empty(shape, route)
        if self._request.max_cost_per_hour and price > self._request.max_cost_per_hour:
            self.refused.price(price)
            return
        if shape.arrangement.startswith("site_") and len({way.stages for way in empty.ways}) > 1:
            return  # virtual stages have to lie on the same ranks of all replicas
        egress, fits = self._egress(shape, route), False
        for layers in self._cuts.of(empty).best() if cuts is None else cuts:
            if (costed := self._costed(replace(empty, layers=layers))) is None:
                continue
            fits = True
            if costed.collective_s == inf:
                self.refused.links()
                continue
            yield from self._scheduled(costed, price, egress + self._reduced_egress(costed.layout))
        if not fits:
            self.refused.memory()

    def cuts_below(self, shape: Shape, route: Route, score: float) -> Iterator[tuple[int, ...]]:
        """The cuts of a whole route that may score less."""
        price, egress = self._price(shape, route), self._egress(shape, route)
        limit_s = self._request.step_of(score, price, egress, self._tokens(shape))
        return self._cuts.of(self._empty(shape, route)).below(limit_s)

    @staticmethod
    def _empty(shape: Shape, route: Route) -> Layout:
        return Layout(**vars(shape), sites=route.sites, stages=route.stages, layers=())

    def _price(self, shape: Shape, route: Route) -> float:
        """Of the GPUs of a whole route, an hour."""
        sites = self._cluster.sites
        each = sum(sites[site].price * held for site, held in zip(route.sites, route.stages, strict=True))
        return each * shape.lines_of_route

    def _costed(self, base: Layout) -> _Costed | None:
        """What a layout takes before it is scheduled; None if it does not fit the memory."""
        estimates, sites, most = self._estimates, self._cluster.sites, self._request.max_memory
        ways = base.ways
        costs, states = tuple(estimates.costs(way) for way in ways), []
        rooms = [inf] * base.num_stages
        collective_s = [0.0] * base.num_stages
        optimizer_s = 0.0
        for way in ways:
            parts = estimates.of_ranks(
                way,
                lambda work, held, site: (
                    estimates.memory(work, held, base),
                    estimates.collective_s(work, base, site),
                    estimates.optimizer_s(work, base, site),
                ),
            )
            states = [memory for memory, _, _ in parts]
            most_bytes = [most * sites[site].gpu.memory_bytes for site in way.site_of()]
            rooms = [min(room, state.room(full)) for room, state, full in zip(rooms, states, most_bytes, strict=True)]
            collective_s = [max(known, one) for known, (_, one, _) in zip(collective_s, parts, strict=True)]
            optimizer_s = max(optimizer_s, *(one for _, _, one in parts))
        if base.routes > 1:
            together = zip(*(way.site_of() for way in ways), strict=True)
            works = estimates.of_ranks(ways[0], lambda work, held, site: work)
            across_s = [estimates.across_s(work, base, at) for work, at in zip(works, together, strict=True)]
            collective_s = [inside + across for inside, across in zip(collective_s, across_s, strict=True)]
        saved = [sum(costs[0].stages[stage].activation_bytes for stage in held) for held in _held(base)]
        if any(left < each for left, each in zip(rooms, saved, strict=True)):
            return None
        return _Costed(base, costs, tuple(states), tuple(rooms), max(collective_s), optimizer_s)

    def _scheduled(self, costed: _Costed, price: float, egress: float) -> Iterator[Candidate]:
        """The candidates of a layout: one for each size of DP-cell and schedule."""
        request, base = self._request, costed.layout
        cap, schedules = self._cap(costed), {}
        for schedule in request.choices("schedule", ["auto", "1f1b"] if base.arrangement == "straight" else ["auto"]):
            rooms = [min(room, cap) for room in costed.rooms] if schedule == "auto" else costed.rooms
            schedules[schedule] = [
                [
                    rooms[rank] / max(stage.activation_bytes, 1.0)
                    for rank, stage in zip(ranks, costs.stages, strict=True)
                ]
                for costs, ranks in ((costs, base.placement.stage_ranks) for costs in costed.costs)
            ]
        for cell in self._cells(base, costed.costs[0]):
            links = [link.streams for costs in costed.costs for _, link in costs.wan_links[::2]]
            layout = replace(base, cell=cell, connections=tuple(links))
            for schedule, in_flight in schedules.items():
                layout = replace(layout, schedule=schedule)
                if schedule != "auto" and (cell > 1 or not self._is_1f1b_held(base, in_flight)):
                    continue
                pipeline_s = max(
                    latency_bound_s(one, base.microbatches, costs, most)
                    for way, costs, most in zip(layout.ways, costed.costs, in_flight, strict=True)
                    for one in way.cells
                )
                bound_s = pipeline_s + costed.collective_s + costed.optimizer_s
                yield Candidate(
                    **vars(replace(costed, layout=layout)),
                    bound_s=bound_s,
                    score_bound=request.score_of(bound_s, layout, price, egress, self._tokens(base)),
                    actions=STARTING
                    + 3
                    * layout.virtual_stages
                    * base.routes
                    * sum(one.pipelines for one in layout.cells)
                    * min(base.microbatches, first_microbatches(layout.virtual_stages)),
                )

    @staticmethod
    def _cap(costed: _Costed) -> float:
        """Bytes of activations that a schedule may hold on any rank: one micro-batch at least; see `schedule`."""
        stages = costed.costs[0].stages
        saved = [sum(stages[stage].activation_bytes for stage in held) for held in _held(costed.layout)]
        return max(min(costed.rooms), *saved)

    @staticmethod
    def _is_1f1b_held(layout: Layout, in_flight: list[list[float]]) -> bool:
        """True if each rank has memory for as many micro-batches as 1F1B holds there."""
        last, count = layout.num_stages, layout.microbatches
        return layout.arrangement == "straight" and all(
            min(count, last - rank) <= room * (1 + 1e-9) for each in in_flight for rank, room in enumerate(each)
        )

    def schedule(self, candidate: Candidate) -> Prediction | None:
        """The prediction of a scheduled layout; None if its schedule exceeds memory."""
        if candidate.layout not in self._predicted:
            self._predicted[candidate.layout] = self._predict(candidate)
        return self._predicted[candidate.layout]

    def _predict(self, candidate: Candidate) -> Prediction | None:
        layout = candidate.layout
        cap = self._cap(candidate)
        enough_s = NEAR * (candidate.bound_s - candidate.collective_s - candidate.optimizer_s)
        cells = [
            pipeline_latency(cell, layout.microbatches, costs, cap, layout.schedule, enough_s)
            for costs, cell in dict.fromkeys(
                (costs, cell) for costs, way in zip(candidate.costs, layout.ways, strict=True) for cell in way.cells
            )
        ]
        pipeline_s = max(cell.step_s for cell in cells)
        peaks = [
            max(max(cell.peak_bytes[rank :: layout.num_stages]) for cell in cells) for rank in range(layout.num_stages)
        ]
        if any(peak > left for peak, left in zip(peaks, candidate.rooms, strict=True)):
            return None
        memory = [replace(state, activations=peak) for state, peak in zip(candidate.states, peaks, strict=True)]
        on = [self._cluster.sites[site] for site in layout.site_of()]
        shares = [memory[rank % layout.num_stages].total / site.gpu.memory_bytes for rank, site in enumerate(on)]
        fullest = max(range(len(shares)), key=shares.__getitem__)
        ends_s = candidate.collective_s + candidate.optimizer_s
        step_s = max(pipeline_s + ends_s, candidate.bound_s)  # a closed form may come out too short
        tokens = self._tokens(layout)
        peak_flops = sum(site.gpu.flops_per_s for site in on) * layout.lines_of_route
        busy_ways_s = [sum(map(busy_s, costs.stages)) for costs in candidate.costs]
        route = Route(layout.sites, layout.stages)
        return Prediction(
            layout=layout,
            step_s=step_s,
            bound_s=candidate.bound_s,
            pipeline_s=pipeline_s,
            collective_s=candidate.collective_s,
            optimizer_s=candidate.optimizer_s,
            busy_s=layout.microbatches * sum(busy_ways_s) / len(busy_ways_s) / layout.num_stages,
            tokens=tokens,
            mfu=self._work.flops_per_token * tokens / step_s / peak_flops,
            memory=memory[fullest % layout.num_stages],
            memory_share=shares[fullest],
            cap_bytes=cap,
            wan_bytes=self._wan_bytes(layout, route),
            price_per_hour=sum(site.price for site in on) * layout.lines_of_route,
            egress_per_step=self._egress(layout, route) + self._reduced_egress(layout),
            binds=self._binds(candidate, step_s),
        )

    def _cells(self, layout: Layout, costs: CostModel) -> list[int]:
        """Sizes of DP-cells."""
        if (pinned := self._request.pins.get("cell")) is not None:
            return [pinned] if pinned <= (layout.replicas if layout.may_pool else 1) else []
        if not costs.wan_links or not layout.may_pool:
            return [1]
        return list(range(1, min(MOST_CELL, layout.replicas) + 1))

    # -- parts ---------------------------------------------------------------------------------

    def _tokens(self, shape: Shape) -> int:
        return shape.sequences * self._work.sequence_length

    def _wan_bytes(self, layout: Layout, route: Route) -> float:
        """Bytes of a step that leave sites: activations and their gradients, then gradients and weights of replicas."""
        each = 2 * layout.crossings * self._work.message_bytes * layout.sequences / layout.routes
        reduced = reduced_bytes(layout) * self._work.parameters * (layout.routes - 1)
        return len(list(route.hops(layout))) * each + reduced

    def _egress(self, shape: Shape, route: Route) -> float:
        """What the bytes of a step cost that leave sites: activations one way, gradients the other."""
        prices = sum(2 * self._between(here, there).egress_price for here, there in route.hops(shape))
        return prices * shape.crossings * self._work.message_bytes * shape.sequences / shape.routes / 1e9

    def _reduced_egress(self, layout: Layout) -> float:
        """What the bytes of a step cost that replicas at different sites exchange for gradients and weights."""
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

    def _binds(self, candidate: Candidate, step_s: float) -> str:
        """What holds a layout up most."""
        layout, count = candidate.layout, candidate.layout.microbatches
        shares: dict[str, float] = {"compute": 0.0}
        filling_s = crossing_s = 0.0
        for way, costs in zip(layout.ways, candidate.costs, strict=True):
            stages = costs.stages
            busy = [sum(busy_s(stages[stage]) for stage in held) for held in _held(way)]
            shares["compute"] = max(shares["compute"], max(busy) * count)
            for (here, there), link in costs.wan_links:
                names = [self._cluster.sites[way.sites[end]].name for end in (here, there)]
                held_s = link.occupancy_s(stages[0].output_bytes) * layout.crossings * count
                shares[f"uplink {names[0]} to {names[1]}"] = held_s
            way_s = sum(
                link.latency_s + link.transit_s(stages[0].output_bytes) / layout.cell for _, link in costs.wan_links
            )
            crossing_s = max(crossing_s, way_s * layout.crossings)
            filling_s = max(filling_s, (sum(busy) - max(busy)) / len(layout.legs))
        shares["the way through sites"] = crossing_s
        shares["filling and draining the pipeline"] = filling_s
        over = "collectives over replicas" + (" at several sites" if layout.routes > 1 else "")
        shares[over] = candidate.collective_s
        most = max(shares, key=lambda name: shares[name])
        return f"{most} ({shares[most] / step_s:.0%} of the step)"


def _held(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Virtual stages of each pipeline rank."""
    return layout.placement.single.rank_stages
