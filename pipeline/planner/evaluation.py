"""The evaluation of layouts: lower bounds of scores first, then a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import inf

from weft.pipeline.planner.bounds import ANYWHERE, Bounds
from weft.pipeline.planner.candidates import Candidate, Candidates, empty_layout
from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.cut_table import CutTable
from weft.pipeline.planner.cuts import Cuts
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.families import FamilyBounds
from weft.pipeline.planner.layout import Prediction, Shape
from weft.pipeline.planner.predictions import Predictions
from weft.pipeline.planner.refusals import Refusals
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.routes import FEW_SITES, Route
from weft.pipeline.planner.shapes import MOST_SEQUENCES, Degrees, all_degrees
from weft.pipeline.planner.traffic import Traffic
from weft.pipeline.workload import LayerWork, ModelWork


class Evaluation:
    """Bounds and predictions of layouts for one request."""

    def __init__(self, cluster: Cluster, work: ModelWork, request: Request) -> None:
        self._cluster, self._work, self._request = cluster, work, request
        self._estimates = Estimates(cluster, work)
        self._least_price = min(site.price for site in cluster.sites)
        self._bounds = Bounds(self._estimates, request.pins.get("cell"), request.max_memory)
        self._cuts = Cuts(self._estimates, request.max_memory, self._bounds.hop_s, self._bounds.held)
        self._traffic = Traffic(self._estimates)
        self.families = FamilyBounds(self._estimates, self._bounds, self._traffic, request)
        self.refused = Refusals(cluster, work, request)
        self._candidates = Candidates(self._estimates, self._traffic, request, self.refused)
        self._predictions = Predictions(self._estimates, self._traffic)

    def degrees_bound(self, degrees: Degrees) -> float:
        """Return the lower bound of the score of these degrees: all GPUs share all work, without other costs."""
        whole = self._whole(degrees)
        step_s, price_seconds = self._bounds.together_s(whole)
        return self._request.bound_of(step_s, 0.0, price_seconds * whole.gpus_per_rank, 0.0, self._tokens(whole))

    def alone_bound(self, site: int) -> float:
        """Return the lowest cost of the work at a site, for any layout."""
        shapes = map(self._whole, all_degrees(self._cluster, self._work, self._request))
        price = self._cluster.sites[site].price / 3600
        return min(
            (
                price * self._bounds.speeds.of(one)[site].whole_s * one.gpus_per_rank / self._tokens(one)
                for one in shapes
            ),
            default=inf,
        )

    def _whole(self, degrees: Degrees) -> Shape:
        """Return a shape with one stage and one micro-batch of the largest size that the degrees allow.

        For the latency objective the micro-batch is one sequence.
        """
        request = self._request
        size = request.sequences or request.pins.get("microbatch_size", MOST_SEQUENCES)
        size = size if request.sequences or request.objective is not Objective.latency else 1
        return Shape(num_stages=1, replicas=1, microbatches=1, microbatch_size=size, **degrees._asdict())

    def going_on_bound(self, shape: Shape, route: Route | None, site: int) -> float:
        """Return the least score of a pipeline that continues from a site of a route to any other site."""
        step_s = self._bounds.going_on_s(shape, route or Route((), ()), site)
        if step_s == inf:
            return inf
        paid, price = self._bounds.price_seconds(shape), shape.gpus * self._least_price
        begun = Route((*route.sites, site), (*route.stages, 1)) if route else Route((site,), (1,))
        return self._request.bound_of(step_s, price, paid, self._least_egress(shape, begun), self._tokens(shape))

    def shape_bound(self, shape: Shape) -> float | None:
        """Return the lower bound of a shape's score for any route and schedule, or None if it fits nowhere."""
        caps = self._bounds.caps(shape)
        numbers = [number for number, cap in enumerate(caps) if cap]
        sites = [self._cluster.sites[number] for number in numbers]
        if sum(caps) < shape.num_stages * shape.routes:
            self.refused.gpus()
            return None
        if not (fullest := self._cuts.fullest(shape, numbers)):
            self.refused.memory(partial(self._needed, shape))
            return None
        price = shape.gpus * min(site.price for site in sites)
        if self._request.max_cost_per_hour and price > self._request.max_cost_per_hour:
            self.refused.price(price)
            return None
        if (step_s := self._bounds.step_s(shape, fullest=fullest)) in (None, inf):
            self.refused.links()
            return None
        return self._paid_bound(shape, ANYWHERE, step_s, price)

    def least_stages(self, shapes: Sequence[Shape]) -> int:
        """Return the least number of stages with which one of these shapes may fit memory.

        Args:
            shapes: shapes that differ in ZeRO, with the largest number of stages.

        Returns:
            0 if none fits with any number of stages.
        """
        found = []
        for shape in shapes:
            sites = [number for number, cap in enumerate(self._bounds.caps(shape)) if cap]
            if least := self._cuts.least_stages(shape, sites):
                found.append(least)
            else:
                self.refused.memory(partial(self._needed, shape))
        return min(found, default=0)

    def _needed(self, shape: Shape) -> tuple[float, str]:
        """Return the bytes that an even division of layers needs on a GPU, and the number of stages."""
        part, held = self._even_part(shape)
        activations = self._estimates.activation_bytes(part, held, shape)
        needed = self._estimates.memory(part, held, shape, activations).total
        return needed, f"pipeline.stages={shape.num_stages}"

    def crowding(self, shape: Shape) -> float:
        """Return the expected ratio of a step to its bound if memory holds few micro-batches.

        It assumes an even division of layers, and counts the micro-batches in flight that fit the first rank. Other
        cuts may do better, so it is not a bound. The search begins where the ratio is low.
        """
        part, held = self._even_part(shape)
        most = self._request.max_memory * max(site.gpu.memory_bytes for site in self._cluster.sites)
        room = self._estimates.memory(part, held, shape).headroom(most)
        in_flight = max(1, int(room / max(self._estimates.activation_bytes(part, held, shape), 1.0)))
        step_s = self._bounds.step_s(shape)
        return max(1.0, self._bounds.crowded_s(shape, in_flight) / step_s) if step_s else 1.0

    def _even_part(self, shape: Shape) -> tuple[LayerWork, int]:
        """Return the work and the number of layers of a rank if all ranks have equally much."""
        return self._bounds.part(shape.num_stages), max(1, len(self._work.layers) // shape.num_stages)

    def sites_of_several(self) -> int:
        """The maximum number of sites of a pipeline if replicas have routes of their own; 1 if there are many sites."""
        return self._request.max_sites if len(self._cluster.sites) <= FEW_SITES else 1

    def route_bound(self, shape: Shape, route: Route, max_sites: int = 0) -> float | None:
        """Return the lower bound of the score of routes that begin with ``route``, or None if there are none."""
        numbers = route.sites if route.is_whole(shape) else range(len(self._cluster.sites))
        if not (fullest := self._cuts.fullest(shape, numbers)):
            self.refused.memory()
            return None
        if (step_s := self._bounds.step_s(shape, route, max_sites, fullest)) is None:
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
        return self._paid_bound(shape, route, step_s, price)

    def tables(self, shape: Shape, route: Route) -> list[tuple[float, CutTable]]:
        """Return the tables of all cuts of a whole route, each with the lower bound of its scores."""
        price, egress = self._traffic.price(shape, route), self._least_egress(shape, route)
        if shape.arrangement.startswith("site_") and len({way.stages for way in empty_layout(shape, route).ways}) > 1:
            return []  # virtual stages have to lie on the same ranks of all replicas
        found = [
            (self._request.score_of(table.step_s, None, price, egress, self._tokens(shape)), table)
            for table in self._cuts.of(empty_layout(shape, route))
        ]
        if not found:
            self.refused.memory()
        return found

    def cuts_below(self, table: CutTable, shape: Shape, route: Route, score: float) -> Iterator[tuple[int, ...]]:
        """Yield the cuts of a table whose score may be below ``score``."""
        price, egress = self._traffic.price(shape, route), self._least_egress(shape, route)
        return table.below(self._request.step_of(score, price, egress, self._tokens(shape)))

    def candidates(
        self, shape: Shape, route: Route, cuts: Iterable[tuple[int, ...]] | None = None
    ) -> Iterator[Candidate]:
        """Yield the candidates of a route: one for each cut, size of DP-cell and schedule.

        Args:
            cuts: layers by virtual stage; None takes those whose slowest rank is the fastest.
        """
        if cuts is None:
            cuts = dict.fromkeys(cut for _, table in self.tables(shape, route) for cut in table.best())
        return self._candidates.of(shape, route, cuts)

    def schedule(self, candidate: Candidate) -> Prediction | None:
        """Schedule a candidate; return its prediction, or None if its schedule exceeds memory."""
        return self._predictions.of(candidate)

    def _paid_bound(self, shape: Shape, route: Route, step_s: float, price: float) -> float:
        """Return the lower bound of the score of routes that begin with ``route``, given bounds of time and price."""
        bound_of, paid = self._request.bound_of, self._bounds.price_seconds(shape, route)
        egress, tokens = self._least_egress(shape, route), self._tokens(shape)
        is_known = self._request.objective is not Objective.cost or route.is_whole(shape)
        if is_known or shape.routes > 1 or len(self._cluster.sites) > FEW_SITES:
            return bound_of(step_s, price, paid, egress, tokens)
        known = self._traffic.egress(shape, route)
        return min(  # fast links may cost more than slow ones
            (
                bound_of(max(step_s, sent_s), price, paid, known + self._traffic.paid_for_hops(shape, prices), tokens)
                for sent_s, prices in self._bounds.completions(shape, route)
            ),
            default=inf,
        )

    def _least_egress(self, shape: Shape, route: Route = ANYWHERE) -> float:
        """Return `Traffic.least_egress`, or 0 if the objective does not count money."""
        return self._traffic.least_egress(shape, route) if self._request.objective is Objective.cost else 0.0

    def _tokens(self, shape: Shape) -> int:
        return shape.sequences * self._work.sequence_length
