"""A second model of steps, memory and prices, written from the documentation, with which plans are compared.

Shared with the planner: the workload of layers, the cluster and its hardware table, layouts as values. Shared core:
schedule generators and the simulator. Not shared: its estimates, bounds, cuts, closed forms and search.
"""

from dataclasses import replace
from functools import cache, reduce
from itertools import accumulate, combinations, pairwise
from math import inf

from tests.pipeline.planner.own_costs import (
    START_S,
    deferred_bytes,
    ends,
    over_replicas_s,
    rank_memory,
    saved_bytes,
    stage_seconds,
    step_bytes,
    weights_of,
)
from weft.pipeline.cell import add_relays
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators.auto_greedy import ListScheduler
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.auto_rules import atlas, backward_first, critical_path
from weft.pipeline.generators.one_f_one_b import generate_1f1b
from weft.pipeline.lowering import lower
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import FREE, Objective
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate

ROUNDING = 1 + 1e-9


def ranks_of(sites, stages):
    return [site for site, held in zip(sites, stages, strict=True) for _ in range(held)]


def without_stages(layout):
    """Return the shape that memory and collectives of a rank depend on, without its layers and its site."""
    shape = Shape(**{name: getattr(layout, name) for name in Shape.__dataclass_fields__})
    return replace(shape, num_stages=1, arrangement="straight")


class Own:
    """The model of one request on one cluster."""

    def __init__(self, cluster, work, request):
        self.cluster, self.work, self.request = cluster, work, request
        self.part, self.rank_ends_s = cache(self._part), cache(self._rank_ends_s)
        self.room, self._memory = cache(self._room), cache(self._rank_memory)

    def _part(self, *spans):
        """The work of some ranges of layers, with the embedding and the head where they belong."""
        parts = [layer for start, stop in spans for layer in self.work.layers[start:stop]]
        for start, stop in spans:
            parts += ends(self.work, first=start == 0, last=stop == len(self.work.layers))
        return reduce(lambda one, other: one + other, parts)

    def _room(self, spans, site, shape):
        """Bytes for saved activations on a rank's GPU; ``shape`` has what memory depends on."""
        return self._memory(spans, shape).headroom(self.request.max_memory * self.cluster.sites[site].gpu.memory_bytes)

    def _rank_memory(self, spans, shape):
        """Memory of a rank without saved activations, the same at all sites."""
        return rank_memory(self.part(*spans), sum(stop - start for start, stop in spans), shape, self.work)

    def _rank_ends_s(self, spans, site, shape):
        """Seconds of a rank after the pipeline, for replicas of one route, and for the optimiser."""
        part, at = self.part(*spans), self.cluster.sites[site]
        lines = shape.replicas * shape.tensor * shape.context
        stepped = part.parameters / lines if shape.zero_stage else sum(weights_of(part, shape))
        return over_replicas_s(step_bytes(shape), part, shape, at), 30 * stepped / at.gpu.bytes_per_s

    def link(self, here, there, shape):
        """Return a pipeline's link: its share of a host's uplink is that of the host's GPUs. None without a link."""
        link = self.cluster.links.get((min(here, there), max(here, there)))
        if link is None:
            return None
        hosts = min(shape.tensor * shape.context / self.cluster.sites[end].gpus_per_host for end in (here, there))
        return LinkCost(
            latency_s=link.latency_s, bandwidth_bps=link.bandwidth_bps * hosts, pair_bps=link.pair_bps * hosts
        )

    def costs(self, layout, sites, stages):
        """Seconds and bytes of one pipeline through ``sites``."""
        sites_of_ranks = ranks_of(sites, stages)
        placement, each, start = layout.placed(stages), [], 0
        for number, count in enumerate(layout.layers):
            site = self.cluster.sites[sites_of_ranks[placement.stage_ranks[number]]]
            part = self.part((start, start + count))
            forward_s, input_s, weight_s = stage_seconds(part, count, layout, site, self.cluster, self.work)
            saved = saved_bytes(part, count, layout, self.work)
            each.append(
                StageCost(
                    forward_s=forward_s,
                    input_s=input_s,
                    weight_s=weight_s,
                    activation_bytes=saved,
                    # Recomputed values wait for the weight gradient like others.
                    weight_saved_bytes=deferred_bytes(part, count, layout, self.work),
                    output_bytes=self.work.message_bytes * layout.microbatch_size,
                )
            )
            start += count
        inside = min(self.cluster.sites[site].network_bps / self.cluster.sites[site].gpus_per_host for site in sites)
        local = LinkCost(latency_s=START_S, bandwidth_bps=inside * layout.tensor * layout.context)
        wan = []
        for number, pair in enumerate(pairwise(sites)):
            cost = self.link(*pair, layout)
            wan += [((number, number + 1), cost), ((number + 1, number), cost)]
        return CostModel(stages=tuple(each), local=local, wan_links=tuple(wan))

    @staticmethod
    def rank_spans(layout, stages):
        """The ranges of layers of each pipeline rank."""
        spans = list(pairwise(accumulate(layout.layers, initial=0)))
        return [tuple(spans[stage] for stage in held) for held in layout.placed(stages).rank_stages]

    @staticmethod
    def routes(layout):
        """Sites and pipeline ranks at each, route by route."""
        found, sites, stages = [], [], []
        for site, held in zip(layout.sites, layout.stages, strict=True):
            sites.append(site)
            stages.append(held)
            if sum(stages) == layout.num_stages:
                found.append((tuple(sites), tuple(stages)))
                sites, stages = [], []
        return found

    def ends_s(self, layout):
        """Seconds after the pipeline: gradients and weights of replicas, and the optimiser."""
        routes, shape = self.routes(layout), without_stages(layout)
        on = [ranks_of(*route) for route in routes]
        reduced_s = stepped_s = 0.0
        for spans, *at in zip(self.rank_spans(layout, routes[0][1]), *on, strict=True):
            each = [self.rank_ends_s(spans, site, shape) for site in at]
            across_s = self.over_wan_s(self.part(*spans), layout, at)
            reduced_s = max(reduced_s, max(inside_s for inside_s, _ in each) + across_s)
            stepped_s = max(stepped_s, *(one_s for _, one_s in each))
        return reduced_s + stepped_s

    def over_wan_s(self, part, layout, at):
        """Replicas at several sites exchange what each site's GPUs have reduced."""
        if layout.routes == 1:
            return 0.0
        dense, experts = weights_of(part, layout)
        gpus = layout.replicas // layout.routes * layout.tensor * layout.context
        share = dense / (gpus // layout.tensor) + experts / (gpus // layout.expert)
        bits, slowest_s = 8 * step_bytes(layout) * share / layout.routes, 0.0
        for here in at:
            links = [self.cluster.link(here, there) for there in at if there != here]
            if None in links:
                return inf
            gpus = self.cluster.sites[here].gpus_per_host
            uplink_s = sum(bits * gpus / link.bandwidth_bps for link in links)
            pair_s = max(bits * gpus / link.pair_bps for link in links)
            slowest_s = max(slowest_s, 2 * max(link.latency_s for link in links) + max(uplink_s, pair_s))
        return slowest_s

    def rooms(self, layout):
        """Bytes for saved activations by rank, at the site of any route that has least; None if one does not fit."""
        hops = {"num_stages": min(3, layout.num_stages), "arrangement": layout.arrangement}  # messages take memory
        shape, found = replace(without_stages(layout), **hops), [inf] * layout.num_stages
        for sites, stages in self.routes(layout):
            ranks = zip(self.rank_spans(layout, stages), ranks_of(sites, stages), strict=True)
            for rank, (spans, site) in enumerate(ranks):
                found[rank] = min(found[rank], self.room(spans, site, shape))
                saved = sum(saved_bytes(self.part(span), span[1] - span[0], layout, self.work) for span in spans)
                if saved > found[rank]:
                    return None
        return found

    def step_s(self, layout):
        """Simulated seconds of a step; infinite where memory or links do not suffice."""
        if (rooms := self.rooms(layout)) is None:
            return inf
        ends_s, slowest_s = self.ends_s(layout), 0.0
        rest = layout.replicas % layout.cell or layout.cell
        for sites, stages in self.routes(layout):
            costs = self.costs(layout, sites, stages)
            for pipelines in {layout.cell, rest}:
                slowest_s = max(slowest_s, self._pipeline_s(layout, stages, costs, pipelines, rooms))
        return slowest_s + ends_s

    def _pipeline_s(self, layout, stages, costs, pipelines, rooms):
        placement = replace(layout.placed(stages), pipelines=pipelines)
        saved = [sum(costs.stages[one].activation_bytes for one in held) for held in placement.single.rank_stages]
        costs, count = costs.for_cell(pipelines), layout.microbatches
        cap = max(min(rooms), *saved) * ROUNDING
        found = []
        for schedule in schedules(layout.schedule, placement, count, costs, cap):
            timeline = simulate(add_relays(lower(schedule), costs), costs)
            peaks = [max(timeline.peak_bytes[rank :: layout.num_stages]) for rank in range(layout.num_stages)]
            if all(peak <= room * ROUNDING for peak, room in zip(peaks, rooms, strict=True)):
                found.append(timeline.step_s)
        return min(found, default=inf)

    def price_per_hour(self, layout):
        lines = layout.replicas // layout.routes * layout.tensor * layout.context
        each = zip(layout.sites, layout.stages, strict=True)
        return sum(self.cluster.sites[site].price * held * lines for site, held in each)

    def egress(self, layout):
        """Money for a step's bytes that leave sites; infinite if replicas are at sites without a link."""
        sequences = layout.replicas // layout.routes * layout.microbatches * layout.microbatch_size
        crossings = 2 if layout.arrangement == "fold" else 1
        price = 0.0
        for sites, _ in self.routes(layout):
            for pair in pairwise(sites):
                price += 2 * self.cluster.link(*pair).egress_price * crossings * self.work.message_bytes * sequences
        if layout.routes > 1:
            on, stages = [ranks_of(*route) for route in self.routes(layout)], self.routes(layout)[0][1]
            for spans, *at in zip(self.rank_spans(layout, stages), *on, strict=True):
                if None in (self.cluster.link(*pair) for pair in combinations(at, 2)):
                    return inf
                prices = sum(2 * self.cluster.link(*pair).egress_price for pair in combinations(at, 2))
                price += prices * step_bytes(layout) * self.part(*spans).parameters / layout.routes
        return price / 1e9

    def score(self, layout, step_s):
        """Return the value that the objective minimises, without the planner's preference among equals."""
        tokens = layout.sequences * self.work.sequence_length
        if self.request.objective is Objective.latency:
            return step_s
        if self.request.objective is Objective.cost:
            return ((self.price_per_hour(layout) + FREE) * step_s / 3600 + self.egress(layout)) / tokens
        return step_s / tokens


def schedules(name, placement, count, costs, cap):
    """Schedules of one DP-cell, lowered later."""
    if name == "1f1b":
        yield generate_1f1b(placement, count)
    else:
        problem = Problem(placement, count, costs)
        rules = [backward_first(problem), atlas(problem, defer_weights=True)]
        if len(placement.legs) > 1:
            rules[1] = critical_path(problem, pace=0.5, weight_delay=inf, wait_share=0.3)
        for rule in rules:
            scheduler = ListScheduler(problem, rule, cap)
            scheduler.run()
            rows = tuple(tuple(map(problem.slot, row)) for row in scheduler.rows)
            yield Schedule("auto", placement, count, rows)
