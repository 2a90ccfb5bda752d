"""Every layout that a user could write down for a small cluster, and those that score less than a limit."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, permutations, product
from math import inf, lcm

import numpy as np

from tests.pipeline.planner.own_costs import messages, rank_memory, saved_bytes, stage_seconds
from tests.pipeline.planner.own_model import Own, without_stages
from weft.pipeline.placement import Placement
from weft.pipeline.planner.layout import LEGS, Layout, Shape
from weft.pipeline.planner.request import MOST_CELL, Objective

OPEN_SIZES = [*range(1, 13), 15, 16, 21, 27, 32, 33, 48, 59, 64]
"""Sequences of a micro-batch that are tried where the batch is open."""


@cache
def bounds_of_cuts(layers, parts):
    """All ways to cut layers into parts, a row of borders each."""
    inside = combinations(range(1, layers), parts - 1)
    return np.array([[0, *borders, layers] for borders in inside], dtype=int)


def shapes(own):
    """All values of what lies within a replica, and of the batch."""
    work, request, sites = own.work, own.request, own.cluster.sites
    most, gpus = max(site.gpus for site in sites), sum(site.gpus for site in sites)
    batches = list(_batches(request, gpus))
    for tensor, context in product(range(1, most + 1), repeat=2):
        if work.heads % tensor or work.sequence_length % tensor or not any(units(sites, tensor * context)):
            continue
        if context > 1 and work.sequence_length % lcm(2 * context, context * tensor):
            continue
        for expert in range(1, work.experts + 1 if work.experts else 2):
            if expert > 1 and (work.experts % expert or expert % tensor):
                continue
            for (size, replicas, count), stages in product(batches, range(1, len(work.layers) + 1)):
                for routes in range(1, min(len(sites), replicas) + 1):
                    each, rest = divmod(replicas, routes)
                    if rest or each * tensor * context % expert or stages * replicas * tensor * context > gpus:
                        continue
                    zeros = (0, 1, 2, 3) if count == 1 else (0, 1, 3)  # 2 differs from 1 where nothing is added up
                    for zero, checkpointing, arrangement in product(zeros, (False, True), LEGS):
                        if (zero == 3 and routes > 1) or len(LEGS[arrangement]) * stages > len(work.layers):
                            continue
                        if zero and replicas * context == 1:
                            continue  # nothing to share out
                        yield Shape(
                            num_stages=stages,
                            replicas=replicas,
                            tensor=tensor,
                            context=context,
                            expert=expert,
                            microbatches=count,
                            microbatch_size=size,
                            zero_stage=zero,
                            checkpointing=checkpointing,
                            arrangement=arrangement,
                            routes=routes,
                        )


def _batches(request, gpus):
    """Sizes of micro-batches, replicas, and micro-batches of each."""
    if not request.sequences:
        yield from ((*one, request.pins["microbatches"]) for one in product(OPEN_SIZES, range(1, gpus + 1)))
        return
    for size, replicas in product(range(1, request.sequences + 1), range(1, gpus + 1)):
        if request.sequences % (size * replicas) == 0:
            yield size, replicas, request.sequences // (size * replicas)


def units(sites, gpus):
    """By site, groups of so many GPUs: within hosts, or of whole hosts."""
    return [
        site.hosts * (site.gpus_per_host // gpus)
        if gpus <= site.gpus_per_host
        else site.hosts // -(-gpus // site.gpus_per_host)
        for site in sites
    ]


def routes(own, num_stages, replicas, gpus_per_rank, sets):
    """All sites, orders and shares of each set of replicas; sets are alike, so their first sites ascend."""
    request = own.request
    caps = [unit // (replicas // sets) for unit in units(own.cluster.sites, gpus_per_rank)]

    def of_one(free):
        for number in range(1, min(len(free), num_stages, request.max_sites or len(free)) + 1):
            for order in permutations(free, number):
                if request.home and not {order[0], order[-1]} <= request.home:
                    continue
                if all(own.cluster.link(*pair) is not None for pair in pairwise(order)):
                    for held in np.diff(bounds_of_cuts(num_stages, number)).tolist():
                        if all(part <= caps[site] for part, site in zip(held, order, strict=True)):
                            yield order, tuple(held)

    def further(missing, free, first):
        if missing == 0:
            yield (), ()
            return
        for order, held in of_one(free):
            if order[0] > first:
                for more, more_held in further(missing - 1, [site for site in free if site not in order], order[0]):
                    yield (*order, *more), (*held, *more_held)

    yield from further(sets, [site for site, cap in enumerate(caps) if cap], -1)


@dataclass(frozen=True)
class Table:
    """By site, first layer and first layer after: seconds of a micro-batch on a virtual stage, and bytes it saves."""

    forward_s: np.ndarray
    input_s: np.ndarray
    weight_s: np.ndarray
    saved: np.ndarray


class BruteForce:
    """All layouts of a request; those that cannot be better than a limit are left out by a bound of their own."""

    def __init__(self, cluster, work, request):
        self.own = Own(cluster, work, request)
        self._tables, self._memories, self._rooms, self._bounds, self._ends = {}, {}, {}, {}, {}
        self.layouts = self.simulated = 0
        self._placed = cache(self._ranks_and_cuts)
        self._routes = cache(lambda *degrees: list(routes(self.own, *degrees)))

    def better(self, limit_of):
        """Layouts that score less than the limit at their price per hour, with their scores.

        Args:
            limit_of: falls with the price.
        """
        for shape in shapes(self.own):
            shared_s, prices = self._shared_s(shape), [site.price for site in self.own.cluster.sites]
            if shared_s >= self._limit_s(shape, limit_of(0.0), prices):
                continue
            for sites, stages in self._routes(shape.num_stages, shape.replicas, shape.gpus_per_rank, shape.routes):
                some = Layout(**vars(shape), sites=sites, stages=stages, layers=())
                price, most = self.own.price_per_hour(some), self.own.request.max_cost_per_hour
                if most and price > most:
                    continue
                limit = limit_of(price)
                limit_s = self._limit_s(shape, limit, [price / shape.gpus])
                for layers, least_s in self._cuts(shape, sites, stages, limit_s) if shared_s < limit_s else ():
                    some = replace(some, layers=layers)
                    if self.own.score(some, least_s + self.own.ends_s(some)) >= limit or not self.own.rooms(some):
                        continue
                    for layout in self._variants(some):
                        self.simulated += 1
                        score = self.own.score(layout, self.own.step_s(layout))
                        if score < limit:
                            yield layout, score

    @staticmethod
    def _variants(some):
        """Schedules and sizes of DP-cells."""
        may_pool = some.tensor * some.context * some.expert * some.routes == 1 and len(some.sites) > 1
        for cell in range(1, (min(MOST_CELL, some.replicas) if may_pool else 1) + 1):
            for schedule in ("auto", "1f1b") if some.arrangement == "straight" and cell == 1 else ("auto",):
                yield replace(some, cell=cell, schedule=schedule)

    @staticmethod
    def _table_key(shape):
        lines = shape.replicas if shape.zero_stage == 3 else 0
        return shape.tensor, shape.context, shape.expert, shape.microbatch_size, shape.checkpointing, lines

    def _table(self, shape):
        if (key := self._table_key(shape)) not in self._tables:
            own, layers = self.own, len(self.own.work.layers)
            values = np.full((4, len(own.cluster.sites), layers + 1, layers + 1), inf)
            for start, stop in combinations(range(layers + 1), 2):
                part, count = own.part((start, stop)), stop - start
                for number, site in enumerate(own.cluster.sites):
                    values[:3, number, start, stop] = stage_seconds(part, count, shape, site, own.cluster, own.work)
                values[3, :, start, stop] = saved_bytes(part, count, shape, own.work)
            self._tables[key] = Table(*values)
        return self._tables[key]

    def _room_table(self, shape):
        """Return the bytes for saved activations of a rank with one virtual stage, which are no less than with two."""
        key = self._memory_key(shape), min(3, shape.num_stages)
        if key not in self._rooms:
            own, layers = self.own, len(self.own.work.layers)
            values = np.full((len(own.cluster.sites), layers + 1, layers + 1), -inf)
            message_bytes = messages(replace(without_stages(shape), num_stages=key[1]), own.work)
            for (start, stop), memory in self._memory(shape).items():
                sent = replace(memory, concurrent_buffers=memory.concurrent_buffers + message_bytes)
                for number, site in enumerate(own.cluster.sites):
                    values[number, start, stop] = sent.headroom(own.request.max_memory * site.gpu.memory_bytes)
            self._rooms[key] = values
        return self._rooms[key]

    @staticmethod
    def _memory_key(shape):
        """Return what a rank's memory depends on, besides its messages; gradients of one micro-batch may be sharded."""
        is_one = shape.zero_stage >= 2 and shape.microbatches == 1
        return *BruteForce._table_key(shape), shape.replicas, shape.zero_stage, is_one

    def _memory(self, shape):
        """By range of layers, the memory of a rank with one virtual stage that sends nothing."""
        if (key := self._memory_key(shape)) not in self._memories:
            own, alone = self.own, without_stages(shape)
            spans = combinations(range(len(own.work.layers) + 1), 2)
            self._memories[key] = {
                (start, stop): rank_memory(own.part((start, stop)), stop - start, alone, own.work)
                for start, stop in spans
            }
        return self._memories[key]

    def _shared_s(self, shape):
        """Seconds of the pipeline if all ranks share all work, and each layer is where it takes least."""
        key = "whole", shape.tensor, shape.context, shape.expert, shape.microbatch_size, shape.checkpointing
        if key not in self._tables:
            table, at = self._table(replace(shape, zero_stage=0)), np.arange(len(self.own.work.layers))
            busy_s = table.forward_s + table.input_s + table.weight_s
            self._tables[key] = busy_s[:, at, at + 1].min(axis=0).sum()
        return shape.microbatches * self._tables[key] / shape.num_stages

    def _ranks_and_cuts(self, arrangement, way, held):
        """The placement of a pipeline, and where tables have its virtual stages for all cuts."""
        placement = Placement.named(arrangement, sum(held), held)
        on = np.repeat(way, held)[list(placement.stage_ranks)]
        cuts = bounds_of_cuts(len(self.own.work.layers), placement.num_stages)
        return placement, (on[None, :], cuts[:, :-1], cuts[:, 1:])

    def _cuts(self, shape, sites, stages, limit_s):
        """Cuts of a route that fit, and may score less than the limit, with a bound of their pipeline's seconds."""
        own, some = self.own, Layout(**vars(shape), sites=sites, stages=stages, layers=())
        cuts, routes_of_some = bounds_of_cuts(len(own.work.layers), shape.virtual_stages), own.routes(some)
        self.layouts += len(cuts)
        if shape.microbatches * max(self._busiest_s(shape, *route) for route in routes_of_some) >= limit_s:
            return
        (bound_s, behind), ends_s = self._bounds_s(shape, sites, stages), self._ends_s(shape, sites, stages)
        if not (bound_s + ends_s < limit_s).any():  # memory only makes bounds longer
            return
        table, fits, of_ranks = self._room_table(shape), bound_s + ends_s < limit_s, []
        for at, ranks in behind:
            rooms = table[at]
            for held_stages, saved, full, ahead_s in ranks:
                room = rooms[:, held_stages].min(axis=1)
                fits &= saved <= room
                of_ranks.append((room, full, ahead_s))
        if not fits.any():
            return
        for room, full, ahead_s in of_ranks:
            bound_s = np.maximum(bound_s, ahead_s + full / np.maximum(room, 1.0))
        for number in np.flatnonzero(fits & (bound_s + ends_s < limit_s)):
            yield tuple(np.diff(cuts[number]).tolist()), float(bound_s[number])

    def _bounds_s(self, shape, sites, stages):
        """By cut, a bound of a pipeline's seconds without memory; by route and rank, what memory makes it longer by."""
        cell = min(MOST_CELL, shape.replicas) if shape.may_pool else 1
        key = *self._table_key(shape), shape.microbatches, shape.num_stages, shape.arrangement, cell, sites, stages
        if key in self._bounds:
            return self._bounds[key]
        table, bound_s, behind = self._table(shape), 0.0, []
        for way, held in self.own.routes(Layout(**vars(shape), sites=sites, stages=stages, layers=())):
            placement, at = self._placed(shape.arrangement, way, held)
            forward_s, input_s, weight_s, saved = (values[at] for values in vars(table).values())
            hops_s = self._hops_s(shape, way, placement)
            ahead_f = np.cumsum(forward_s + hops_s, axis=1) - forward_s - hops_s
            ahead_i = np.cumsum(input_s + hops_s, axis=1) - input_s - hops_s
            bound_s = np.maximum(bound_s, (forward_s + input_s + 2 * hops_s).sum(axis=1) + weight_s[:, 0])
            for stages_of_rank in placement.rank_stages:
                first, held_stages = stages_of_rank[0], list(stages_of_rank)
                through_s = (forward_s + input_s)[:, held_stages].sum(axis=1) * shape.microbatches
                weights_s = weight_s[:, held_stages].sum(axis=1) * shape.microbatches
                tail_s = np.maximum(weights_s, ahead_i[:, first] + weight_s[:, 0])
                bound_s = np.maximum(bound_s, ahead_f[:, first] + through_s + tail_s)
            hop_and_stage_s = forward_s + input_s + 2 * hops_s
            ahead_s = np.cumsum(hop_and_stage_s, axis=1)
            behind_s = ahead_s[:, -1:] - ahead_s + hop_and_stage_s  # from a forward until it is back
            ranks = []
            for held_stages in map(list, placement.rank_stages):
                full = (saved * behind_s)[:, held_stages].sum(axis=1) * shape.microbatches
                ranks.append((held_stages, saved[:, held_stages].sum(axis=1), full, ahead_f[:, held_stages[0]]))
            behind.append((at, ranks))
        self._bounds[key] = bound_s, behind
        return self._bounds[key]

    def _ends_s(self, shape, sites, stages):
        """By cut, the seconds after the pipeline, at least: each rank has one of its virtual stages."""
        degrees = shape.tensor, shape.context, shape.expert, shape.replicas, shape.zero_stage, shape.routes
        key = *degrees, shape.num_stages, shape.arrangement, sites, stages
        if key not in self._ends:
            if ("ends", *degrees) not in self._tables:
                own, layers, alone = self.own, len(self.own.work.layers), without_stages(shape)
                table = np.zeros((2, len(own.cluster.sites), layers + 1, layers + 1))
                for (start, stop), site in product(combinations(range(layers + 1), 2), range(len(own.cluster.sites))):
                    table[:, site, start, stop] = own.rank_ends_s(((start, stop),), site, alone)
                self._tables["ends", *degrees] = table
            reduced_s, stepped_s = self._tables["ends", *degrees]
            routes_of_some = self.own.routes(Layout(**vars(shape), sites=sites, stages=stages, layers=()))
            ats = [self._placed(shape.arrangement, *route)[1] for route in routes_of_some]
            each = [[table[at].max(axis=1) for at in ats] for table in (reduced_s, stepped_s)]
            self._ends[key] = np.max(each[0], axis=0) + np.max(each[1], axis=0)
        return self._ends[key]

    def _busiest_s(self, shape, way, held):
        """Seconds of a micro-batch on the rank that works longest, at the cut that makes these least."""
        key = "busiest", *self._table_key(shape), shape.arrangement, way, held
        if key not in self._tables:
            (placement, at), table = self._placed(shape.arrangement, way, held), self._table(shape)
            busy_s = (table.forward_s + table.input_s + table.weight_s)[at]
            ranks_s = [busy_s[:, list(held_stages)].sum(axis=1) for held_stages in placement.rank_stages]
            self._tables[key] = np.max(ranks_s, axis=0).min()
        return self._tables[key]

    def _hops_s(self, shape, way, placement):
        """Seconds between each virtual stage and the next, at least."""
        cell = min(MOST_CELL, shape.replicas) if shape.may_pool else 1
        num_bytes, found = self.own.work.message_bytes * shape.microbatch_size, []
        for stage in range(placement.num_stages - 1):
            here, there = (placement.rank_sites[placement.stage_ranks[one]] for one in (stage, stage + 1))
            if here == there:
                found.append(0.0)
            else:
                link = self.own.link(way[here], way[there], shape)
                found.append(link.latency_s + link.transit_s(num_bytes) / cell)
        return np.array([*found, 0.0])

    def _limit_s(self, shape, limit, prices):
        """Seconds of a step that scores as much as the limit at the least of the prices of a GPU."""
        tokens = shape.sequences * self.own.work.sequence_length
        if self.own.request.objective is Objective.latency:
            return limit
        if self.own.request.objective is Objective.cost:
            price = min(prices) * shape.gpus
            return limit * tokens * 3600 / price if price else inf
        return limit * tokens
