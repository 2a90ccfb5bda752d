"""Candidates: whole layouts with their costs and lower bounds, before they are scheduled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from weft.pipeline.costs import CostModel
from weft.pipeline.memory import RankMemory
from weft.pipeline.planner.estimates import Estimates, memory_key
from weft.pipeline.planner.latency import first_microbatches, latency_bound_s
from weft.pipeline.planner.layout import Layout, Shape
from weft.pipeline.planner.refusals import Refusals
from weft.pipeline.planner.request import MOST_CELL, Request
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.traffic import Traffic

STARTING = 200
"""Actions whose scheduling takes as long as the preparation for any."""


@dataclass(frozen=True)
class Costed:
    """A layout with its costs, before a schedule and a DP-cell are chosen.

    Attributes:
        costs: costs of one pipeline, on each route.
        states: memory of each rank, without saved activations.
        rooms: bytes for saved activations on each rank, at the route's site where they are fewest.
        collective_s: collectives over replicas.
    """

    layout: Layout
    costs: tuple[CostModel, ...]
    states: tuple[RankMemory, ...]
    rooms: tuple[float, ...]
    collective_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True)
class Candidate(Costed):
    """A layout with its costs, a schedule and a DP-cell, before it is scheduled.

    Attributes:
        actions: number of actions that have to be scheduled.
    """

    bound_s: float
    score_bound: float
    actions: int


class Candidates:
    """The candidates of one request."""

    def __init__(self, estimates: Estimates, traffic: Traffic, request: Request, refused: Refusals) -> None:
        self._estimates, self._cluster, self._traffic = estimates, estimates.cluster, traffic
        self._request, self.refused = request, refused

    def of(self, shape: Shape, route: Route, cuts: Iterable[tuple[int, ...]]) -> Iterator[Candidate]:
        """Yield the candidates of a route: one for each size of DP-cell and each schedule.

        Args:
            cuts: layers by virtual stage.
        """
        price, empty = self._traffic.price(shape, route), empty_layout(shape, route)
        if self._request.max_cost_per_hour and price > self._request.max_cost_per_hour:
            self.refused.price(price)
            return
        if shape.arrangement.startswith("site_") and len({way.stages for way in empty.ways}) > 1:
            return  # virtual stages have to lie on the same ranks of all replicas
        egress, fits = self._traffic.egress(shape, route), False
        for layers in cuts:
            if (costed := self._costed(empty.changed(layers=layers))) is None:
                continue
            fits = True
            if costed.collective_s == inf:
                self.refused.links()
                continue
            yield from self._scheduled(costed, price, egress + self._traffic.reduced_egress(costed.layout))
        if not fits:
            self.refused.memory()

    def _costed(self, base: Layout) -> Costed | None:
        """Return the costs of a layout before it is scheduled, or None if it does not fit the memory."""
        estimates, sites, most = self._estimates, self._cluster.sites, self._request.max_memory
        ways = base.ways
        costs, states = tuple(estimates.costs(way) for way in ways), []
        rooms = [inf] * base.num_stages
        collective_s = [0.0] * base.num_stages
        optimizer_s = 0.0
        for way in ways:
            parts = estimates.of_ranks(
                way,
                ("rank", *memory_key(base)),
                lambda work, held, site: (
                    estimates.memory(work, held, base),
                    estimates.collective_s(work, base, site),
                    estimates.optimizer_s(work, base, site),
                ),
            )
            states = [memory for memory, _, _ in parts]
            most_bytes = [most * sites[site].gpu.memory_bytes for site in way.site_of()]
            rooms = [
                min(room, state.headroom(full)) for room, state, full in zip(rooms, states, most_bytes, strict=True)
            ]
            collective_s = [max(known, one) for known, (_, one, _) in zip(collective_s, parts, strict=True)]
            optimizer_s = max(optimizer_s, *(one for _, _, one in parts))
        if base.routes > 1:
            together = zip(*(way.site_of() for way in ways), strict=True)
            works = estimates.works(ways[0])
            across_s = [estimates.across_s(work, base, at) for work, at in zip(works, together, strict=True)]
            collective_s = [inside + across for inside, across in zip(collective_s, across_s, strict=True)]
        saved = [sum(costs[0].stages[stage].activation_bytes for stage in held) for held in held_by(base)]
        if any(left < each for left, each in zip(rooms, saved, strict=True)):
            return None
        return Costed(base, costs, tuple(states), tuple(rooms), max(collective_s), optimizer_s)

    def _scheduled(self, costed: Costed, price: float, egress: float) -> Iterator[Candidate]:
        """Yield the candidates of a layout: one for each size of DP-cell and each schedule."""
        request, base = self._request, costed.layout
        cap, schedules = cap_of(costed), {}
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
            layout = base.changed(cell=cell, connections=tuple(links))
            for schedule, in_flight in schedules.items():
                layout = layout.changed(schedule=schedule)
                if schedule != "auto" and (cell > 1 or not self._is_1f1b_held(base, in_flight)):
                    continue
                pipeline_s = max(
                    latency_bound_s(one, base.microbatches, costs, most)
                    for way, costs, most in zip(layout.ways, costed.costs, in_flight, strict=True)
                    for one in way.cells
                )
                bound_s = pipeline_s + costed.collective_s + costed.optimizer_s
                yield Candidate(
                    **{**vars(costed), "layout": layout},
                    bound_s=bound_s,
                    score_bound=request.score_of(
                        bound_s, layout, price, egress, base.sequences * self._estimates.work.sequence_length
                    ),
                    actions=STARTING
                    + 3
                    * layout.virtual_stages
                    * base.routes
                    * sum(one.pipelines for one in layout.cells)
                    * min(base.microbatches, first_microbatches(layout.virtual_stages)),
                )

    @staticmethod
    def _is_1f1b_held(layout: Layout, in_flight: list[list[float]]) -> bool:
        """True if each rank has memory for as many micro-batches as 1F1B holds there."""
        last, count = layout.num_stages, layout.microbatches
        return layout.arrangement == "straight" and all(
            min(count, last - rank) <= room * (1 + 1e-9) for each in in_flight for rank, room in enumerate(each)
        )

    def _cells(self, layout: Layout, costs: CostModel) -> list[int]:
        """Return the sizes of DP-cells to compare."""
        if (pinned := self._request.pins.get("cell")) is not None:
            return [pinned] if pinned <= (layout.replicas if layout.may_pool else 1) else []
        if not costs.wan_links or not layout.may_pool:
            return [1]
        return list(range(1, min(MOST_CELL, layout.replicas) + 1))


def empty_layout(shape: Shape, route: Route) -> Layout:
    """Return a layout for which no layers have been assigned."""
    return Layout(**vars(shape), sites=route.sites, stages=route.stages, layers=())


def cap_of(costed: Costed) -> float:
    """Return the activation bytes that a schedule may hold on any rank: at least one micro-batch. See `Predictions`."""
    stages = costed.costs[0].stages
    saved = [sum(stages[stage].activation_bytes for stage in held) for held in held_by(costed.layout)]
    return max(min(costed.rooms), *saved)


def held_by(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the virtual stages of each pipeline rank."""
    return layout.placement.single.rank_stages
