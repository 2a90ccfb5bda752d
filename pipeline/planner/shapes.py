"""The shapes that are compared: every value that a pin may have, in families that differ in little."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt, lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.workload import ModelWork

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MOST_ROUTES = 8
"""Sets of replicas that are compared on routes of their own."""
MANY_REPLICAS = 512
"""Replicas up to which all numbers are compared where the batch is left open."""
MOST_SEQUENCES = 64
"""Sequences of a micro-batch up to which all sizes are compared where the batch is left open."""


class Degrees(NamedTuple):
    """The numbers of GPUs that share a layer's weights, a sequence, and the experts."""

    tensor: int
    context: int
    expert: int

    @property
    def gpus_per_rank(self) -> int:
        """The number of GPUs of one pipeline rank of one replica."""
        return self.tensor * self.context


def shapes(cluster: Cluster, work: ModelWork, request: Request) -> Iterator[Shape]:
    """Yield all shapes for which the cluster has enough GPUs; memory is checked later, by `Estimates`."""
    for degrees in all_degrees(cluster, work, request):
        for family in families(cluster, work, request, degrees):
            for stages in stage_counts(cluster, work, request, family):
                for shape in members(request, family, stages):
                    yield from arranged(work, request, shape)


def all_degrees(cluster: Cluster, work: ModelWork, request: Request) -> Iterator[Degrees]:
    """Yield the degrees of parallelism inside of a layer that the model and at least one site allow."""
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
                is_pooled = request.pins.get("cell", 1) > 1  # see `Shape.may_pool`
                if is_pooled and (tensor, context, expert) != (1, 1, 1):
                    continue
                if expert == 1 or (work.experts and not (work.experts % expert or expert % tensor)):
                    yield Degrees(tensor, context, expert)


class Group(NamedTuple):
    """Families that differ in replicas, micro-batches and routes, as arrays.

    Attributes:
        family: a shape of one stage with the other properties; its ZeRO stage 3 stands for all stages.
        most: by family, the largest number of stages for which there are layers and GPUs.
        most_alone: the same within the site with the most GPUs.
    """

    family: Shape
    replicas: Array
    microbatches: Array
    routes: Array
    most: Array
    most_alone: Array


def groups(cluster: Cluster, work: ModelWork, request: Request, degrees: Degrees) -> Iterator[Group]:
    """Yield the families of these degrees, one group for each micro-batch size and choice of checkpointing."""
    import numpy as np

    gpus, limit = degrees.gpus_per_rank, min(len(cluster.sites), MOST_ROUTES)
    routes = np.array([one for one in request.choices("routes", list(range(1, limit + 1))) if one <= limit], dtype=int)
    units = np.array([site.units(gpus) for site in cluster.sites])
    for size, *batch in _batches(cluster, work, request, gpus):
        replicas, microbatches = (np.array(one, dtype=int)[:, None] for one in batch)
        each = np.maximum(replicas // np.maximum(routes, 1), 1)
        ranks = units[:, None, None] // each
        fits = (replicas % routes == 0) & (replicas <= units.sum()) & (ranks.sum(axis=0) >= routes)
        fits &= (replicas * gpus % degrees.expert == 0) & (each * gpus % degrees.expert == 0)
        if (cell := request.pins.get("cell", 1)) > 1:
            fits &= (replicas >= cell) & (routes == 1)
        at = np.nonzero(fits)
        most = np.minimum(ranks.sum(axis=0) // routes, len(work.layers))[at]
        alone = np.minimum(ranks.max(axis=0)[at], most)
        for checkpointing in request.choices("checkpointing", [False, True]) if len(most) else ():
            family = Shape(
                num_stages=1,
                replicas=1,
                microbatches=1,
                microbatch_size=size,
                zero_stage=3,
                checkpointing=checkpointing,
                **degrees._asdict(),
            )
            yield Group(family, replicas[at[0], 0], microbatches[at[0], 0], routes[at[1]], most, alone)


def families(cluster: Cluster, work: ModelWork, request: Request, degrees: Degrees) -> Iterator[Shape]:
    """Yield a shape with one stage for each family: micro-batches, replicas, routes and checkpointing."""
    for group in groups(cluster, work, request, degrees):
        fields = (array.tolist() for array in (group.replicas, group.microbatches, group.routes))
        for replicas, microbatches, routes in zip(*fields, strict=True):
            yield group.family.changed(replicas=replicas, microbatches=microbatches, routes=routes)


def stage_counts(cluster: Cluster, work: ModelWork, request: Request, family: Shape) -> list[int]:
    """Return the numbers of stages for which there are enough layers and GPUs."""
    total = sum(site_capacity(cluster, family.gpus_per_rank, family.replicas_of_route)) // family.routes
    most = min(total, len(work.layers))
    return [stages for stages in request.choices("num_stages", list(range(1, most + 1))) if stages <= most]


def members(request: Request, family: Shape, stages: int) -> Iterator[Shape]:
    """Yield the shapes of a family with this number of stages, one for each ZeRO stage.

    They are straight unless a placement is pinned.
    """
    for zero in request.choices("zero_stage", _zero_stages(family)):
        if zero < 3 or family.routes == 1:  # ZeRO 3 gathers weights for every micro-batch: not over the WAN
            (arrangement,) = request.choices("arrangement", ["straight"])
            yield family.changed(num_stages=stages, zero_stage=zero, arrangement=arrangement)


def arranged(work: ModelWork, request: Request, shape: Shape) -> Iterator[Shape]:
    """Yield the shape with each placement that its layers allow, the straight one first."""
    for arrangement in request.choices("arrangement", list(LEGS)):
        is_other = shape.num_stages > 1 or arrangement == "straight" or "arrangement" in request.pins
        if len(LEGS[arrangement]) * shape.num_stages <= len(work.layers) and is_other:
            yield shape.changed(arrangement=arrangement)


def site_capacity(cluster: Cluster, gpus_per_rank: int, replicas: int) -> list[int]:
    """Return, by site, the pipeline ranks that it has GPUs for, with all replicas of each (Algorithm 1, step 4)."""
    return [site.units(gpus_per_rank) // replicas for site in cluster.sites]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _zero_stages(family: Shape) -> list[int]:
    """Return the ZeRO stages to compare; stage 2 needs less memory than 1 only for a single micro-batch."""
    if family.replicas * family.context == 1:
        return [0]
    return [1, 2, 3] if family.microbatches == 1 else [1, 3]


def _batches(
    cluster: Cluster, work: ModelWork, request: Request, gpus_per_rank: int
) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield each micro-batch size, with numbers of replicas and the micro-batches that remain for each replica."""
    units = [site.units(gpus_per_rank) for site in cluster.sites]
    if request.sequences:
        for size in request.choices("microbatch_size", _divisors(request.sequences)):
            whole, rest = divmod(request.sequences, size)
            found = [
                (replicas, whole // replicas)
                for replicas in request.choices("replicas", [] if rest else _divisors(whole))
                if not rest and whole % replicas == 0 and replicas <= sum(units)
            ]
            kept = [one for one in found if request.pins.get("microbatches", one[1]) == one[1]]
            yield size, [replicas for replicas, _ in kept], [count for _, count in kept]
        return
    # With micro-batches given, more replicas are a larger batch; of very many, those at which a site loses a stage.
    routes = range(1, min(len(units), MOST_ROUTES) + 1)
    stages = range(1, len(work.layers) + 1)
    ends = {count * (unit // held) for unit in units for held in stages for count in routes} - {0}
    replicas = request.choices("replicas", sorted({*range(1, min(sum(units), MANY_REPLICAS) + 1), *ends}))
    for size in request.choices("microbatch_size", list(range(1, MOST_SEQUENCES + 1))):
        yield size, replicas, [request.pins["microbatches"]] * len(replicas)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
