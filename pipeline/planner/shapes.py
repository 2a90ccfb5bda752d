"""The shapes that are compared: degrees of parallelism, replicas, stages, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.workload import ModelWork

LONG_SEQUENCE = 32_768
"""Tokens from which on sharing a sequence is tried."""
MICROBATCH_SIZES = (1, 2, 4, 8)
FEW_MICROBATCHES = 4
"""Micro-batches for each rank from which on folds are not compared."""
MOST_ROUTES = 8
"""Sets of replicas that are compared on routes of their own."""
MOST_EXPERT = 64
"""GPUs that are compared as sharing experts."""


def shapes(cluster: Cluster, work: ModelWork, request: Request) -> Iterator[Shape]:
    """All shapes for which some sites of the cluster have GPUs; see `Estimates` for what fits their memory.

    Folds are those within sites, and `Routes.fold_over_sites` has the others, unless these are asked for.
    """
    widest = max(site.gpus_per_host for site in cluster.sites)
    sharing = _powers(8) if work.sequence_length >= LONG_SEQUENCE else [1]
    for tensor in request.choices("tensor", _powers(widest)):
        if work.heads % tensor:
            continue
        for context in request.choices("context", sharing):
            for size in request.choices("microbatch_size", list(MICROBATCH_SIZES)):
                for replicas, microbatches in _batches(cluster, request, tensor * context, size, len(work.layers)):
                    for expert in request.choices("expert", _experts(work, tensor)):
                        if not _may_share(work, expert, tensor, replicas * context * tensor):
                            continue
                        for stages in _stages(cluster, request, tensor * context, replicas, len(work.layers)):
                            for checkpointing in request.choices("checkpointing", [False, True]):
                                for zero in request.choices(
                                    "zero_stage", _zero_stages(replicas * context, microbatches)
                                ):
                                    for arrangement in _arrangements(request, stages, microbatches, work):
                                        shape = Shape(
                                            num_stages=stages,
                                            replicas=replicas,
                                            tensor=tensor,
                                            context=context,
                                            expert=expert,
                                            microbatches=microbatches,
                                            microbatch_size=size,
                                            zero_stage=zero,
                                            checkpointing=checkpointing,
                                            arrangement=arrangement,
                                        )
                                        yield from _on_routes(cluster, request, shape)


def _on_routes(cluster: Cluster, request: Request, shape: Shape) -> Iterator[Shape]:
    """The shape with all replicas on one route, and with them on several.

    ZeRO 3 has one route: it gathers weights for every micro-batch, and they would cross the WAN each time.
    """
    most = min(len(cluster.sites), MOST_ROUTES) if shape.zero_stage < 3 else 1
    for routes in request.choices("routes", list(range(1, most + 1))):
        each, rest = divmod(shape.replicas, routes)
        if rest or routes > most or each * shape.gpus_per_rank % shape.expert:
            continue
        if sum(room(cluster, shape.gpus_per_rank, each)) >= routes * shape.num_stages:
            yield replace(shape, routes=routes) if routes > 1 else shape


def room(cluster: Cluster, gpus_per_rank: int, replicas: int) -> list[int]:
    """Pipeline ranks that each site has room for, all replicas of each: step 4 of Algorithm 1 (Atlas)."""
    return [site.units(gpus_per_rank) // replicas for site in cluster.sites]


def _arrangements(request: Request, stages: int, microbatches: int, work: ModelWork) -> Iterator[str]:
    """Several passes through ranks fill a pipeline sooner, which many micro-batches pay for anyway."""
    few = stages > 1 and microbatches < FEW_MICROBATCHES * stages
    for arrangement in request.choices("arrangement", ["straight", "site_fold"] if few else ["straight"]):
        if len(LEGS[arrangement]) * stages <= len(work.layers):
            yield arrangement


def _experts(work: ModelWork, tensor: int) -> list[int]:
    """How many GPUs may share experts: those that share other weights are among them."""
    if not work.experts:
        return [1]
    return sorted({1, *(tensor * power for power in _powers(MOST_EXPERT // tensor))})


def _may_share(work: ModelWork, expert: int, tensor: int, lines: int) -> bool:
    return expert == 1 or (work.experts > 0 and not (work.experts % expert or expert % tensor or lines % expert))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _zero_stages(shards: int, microbatches: int) -> list[int]:
    """Stages that may be best: 2 holds less than 1 only where gradients are not added up over micro-batches."""
    if shards == 1:
        return [0]
    return [1, 2, 3] if microbatches == 1 else [1, 3]


def _batches(
    cluster: Cluster, request: Request, gpus_per_rank: int, size: int, num_layers: int
) -> Iterator[tuple[int, int]]:
    """Replicas, and the micro-batches that are left to each."""
    units = [site.units(gpus_per_rank) for site in cluster.sites]
    if request.sequences:
        whole, rest = divmod(request.sequences, size)
        for replicas in request.choices("replicas", [] if rest else _divisors(whole)):
            count, left = divmod(whole, replicas)
            if not rest and not left and replicas <= sum(units) and request.pins.get("microbatches", count) == count:
                yield replicas, count
        return
    # With micro-batches given, more replicas are a larger batch: those at which a site loses a stage.
    routes = range(1, min(len(units), MOST_ROUTES) + 1)
    ends = {count * (unit // stages) for unit in units for stages in range(1, num_layers + 1) for count in routes} - {0}
    for replicas in request.choices("replicas", sorted(ends)):
        yield replicas, request.pins["microbatches"]


def _stages(cluster: Cluster, request: Request, gpus_per_rank: int, replicas: int, num_layers: int) -> Iterator[int]:
    """Numbers of stages: the fewest for each number of layers of the fullest, as far as there are GPUs."""
    total = sum(room(cluster, gpus_per_rank, 1)) // replicas
    fewest = sorted({-(-num_layers // layers) for layers in range(1, num_layers + 1)})
    for stages in request.choices("num_stages", fewest):
        if stages <= min(total, num_layers):
            yield stages


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
