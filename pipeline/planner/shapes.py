"""The shapes that are compared: every value that a pin may have, in families that differ in little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt, lcm
from typing import NamedTuple

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.workload import ModelWork

MOST_ROUTES = 8
"""Sets of replicas that are compared on routes of their own."""
MANY_REPLICAS = 512
"""Replicas up to which all numbers are compared where the batch is left open."""


class Degrees(NamedTuple):
    """GPUs that share a layer's weights, a sequence, and the experts."""

    tensor: int
    context: int
    expert: int

    @property
    def gpus_per_rank(self) -> int:
        """GPUs of one pipeline rank of one replica."""
        return self.tensor * self.context


def shapes(cluster: Cluster, work: ModelWork, request: Request) -> Iterator[Shape]:
    """All shapes for which some sites of the cluster have GPUs; `Estimates` has the memory that each needs."""
    for degrees in all_degrees(cluster, work, request):
        for family in families(cluster, work, request, degrees):
            for stages in stage_counts(cluster, work, request, family):
                for shape in members(request, family, stages):
                    yield from arranged(work, request, shape)


def all_degrees(cluster: Cluster, work: ModelWork, request: Request) -> Iterator[Degrees]:
    """The degrees of parallelism inside of a layer that the model and some site allow."""
    most = max(site.gpus for site in cluster.sites)
    widest = max(site.gpus_per_host for site in cluster.sites)
    heads = _divisors(work.heads) if work.heads else sorted({*range(1, widest + 1), *_powers(most)})
    halves = _divisors(max(1, work.sequence_length // 2))
    for tensor in request.choices("tensor", heads):
        if work.heads % tensor or work.sequence_length % tensor:
            continue
        for context in request.choices("context", halves):
            if context > 1 and work.sequence_length % lcm(2 * context, context * tensor):
                continue
            if not any(site.units(tensor * context) for site in cluster.sites):
                continue
            for expert in request.choices("expert", _divisors(work.experts) if work.experts else [1]):
                if expert == 1 or (work.experts and not (work.experts % expert or expert % tensor)):
                    yield Degrees(tensor, context, expert)


def families(cluster: Cluster, work: ModelWork, request: Request, degrees: Degrees) -> Iterator[Shape]:
    """The shapes of one stage: micro-batches, replicas, routes and checkpointing; ZeRO 3 stands for all its stages."""
    gpus = degrees.gpus_per_rank
    units = sum(site.units(gpus) for site in cluster.sites)
    for size, replicas, microbatches in _batches(cluster, work, request, gpus):
        if replicas * gpus % degrees.expert:
            continue
        for routes in request.choices("routes", list(range(1, min(len(cluster.sites), MOST_ROUTES) + 1))):
            each, rest = divmod(replicas, routes)
            if rest or routes > min(len(cluster.sites), MOST_ROUTES) or each * gpus % degrees.expert:
                continue
            if replicas > units or sum(room(cluster, gpus, each)) < routes:
                continue
            for checkpointing in request.choices("checkpointing", [False, True]):
                yield Shape(
                    num_stages=1,
                    replicas=replicas,
                    tensor=degrees.tensor,
                    context=degrees.context,
                    expert=degrees.expert,
                    microbatches=microbatches,
                    microbatch_size=size,
                    zero_stage=3,
                    checkpointing=checkpointing,
                    routes=routes,
                )


def stage_counts(cluster: Cluster, work: ModelWork, request: Request, family: Shape) -> list[int]:
    """Numbers of stages for which there are layers and GPUs."""
    total = sum(room(cluster, family.gpus_per_rank, family.replicas_of_route)) // family.routes
    most = min(total, len(work.layers))
    return [stages for stages in request.choices("num_stages", list(range(1, most + 1))) if stages <= most]


def members(request: Request, family: Shape, stages: int) -> Iterator[Shape]:
    """The shapes of a family with so many stages, one for each ZeRO stage, straight if no placement is pinned."""
    for zero in request.choices("zero_stage", _zero_stages(family)):
        if zero < 3 or family.routes == 1:  # ZeRO 3 gathers weights for every micro-batch: not over the WAN
            (arrangement,) = request.choices("arrangement", ["straight"])
            yield replace(family, num_stages=stages, zero_stage=zero, arrangement=arrangement)


def arranged(work: ModelWork, request: Request, shape: Shape) -> Iterator[Shape]:
    """The shape with each placement that its layers allow; the straight one comes first."""
    for arrangement in request.choices("arrangement", list(LEGS)):
        is_other = shape.num_stages > 1 or arrangement == "straight" or "arrangement" in request.pins
        if len(LEGS[arrangement]) * shape.num_stages <= len(work.layers) and is_other:
            yield replace(shape, arrangement=arrangement)


def room(cluster: Cluster, gpus_per_rank: int, replicas: int) -> list[int]:
    """Pipeline ranks that each site has room for, all replicas of each: step 4 of Algorithm 1 (Atlas)."""
    return [site.units(gpus_per_rank) // replicas for site in cluster.sites]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _zero_stages(family: Shape) -> list[int]:
    """Stages that may be best: 2 holds less than 1 only where gradients are not added up over micro-batches."""
    if family.replicas * family.context == 1:
        return [0]
    return [1, 2, 3] if family.microbatches == 1 else [1, 3]


def _batches(cluster: Cluster, work: ModelWork, request: Request, gpus_per_rank: int) -> Iterator[tuple[int, int, int]]:
    """Sizes of micro-batches, replicas, and the micro-batches that are left to each."""
    units = [site.units(gpus_per_rank) for site in cluster.sites]
    if request.sequences:
        for size in request.choices("microbatch_size", _divisors(request.sequences)):
            whole, rest = divmod(request.sequences, size)
            for replicas in request.choices("replicas", [] if rest else _divisors(whole)):
                count, left = divmod(whole, replicas)
                is_asked_for = request.pins.get("microbatches", count) == count
                if not rest and not left and replicas <= sum(units) and is_asked_for:
                    yield size, replicas, count
        return
    # With micro-batches given, more replicas are a larger batch; of very many, those at which a site loses a stage.
    routes = range(1, min(len(units), MOST_ROUTES) + 1)
    stages = range(1, len(work.layers) + 1)
    ends = {count * (unit // held) for unit in units for held in stages for count in routes} - {0}
    for size in request.choices("microbatch_size", _powers(64)):
        for replicas in request.choices("replicas", sorted({*range(1, min(sum(units), MANY_REPLICAS) + 1), *ends})):
            yield size, replicas, request.pins["microbatches"]


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
