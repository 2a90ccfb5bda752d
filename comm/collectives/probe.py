"""Measures the cost of each primitive along each axis of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.collective import EXECUTED, GATHERING, Primitive
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.costs import CollectiveCosts, Sample, fit, moved_share, rounds
from weft.comm.collectives.group import LinkClass
from weft.comm.collectives.primitives import PRIMITIVES
from weft.comm.exchange import gather
from weft.comm.job import GatherPurpose, current_job
from weft.conf.host.measurements import spread_of
from weft.conf.host.processes import host_identity

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
"""Workload sizes to measure, in bytes."""
MAX_SLOWDOWN_S = 0.3
"""Larger workloads are skipped once a primitive has become slower by this many seconds."""


def nodes_of_world() -> tuple[int, ...]:
    """Return the node of each rank of the world, counted from 0. A collective call.

    Different network namespaces of one machine count as different nodes.
    """
    hosts = gather(host_identity(), purpose=GatherPurpose.host)
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(order[host] for host in hosts)


def measure(
    communicator: Communicator,
    *,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    repeats: int = 3,
    concurrent: dist.ProcessGroup | None = None,
) -> list[Sample]:
    """Time every primitive along every open axis. A collective call over the group.

    A sample is the median over repeats of the slowest rank, with all sub-groups of the axis communicating.

    Args:
        sizes: workloads in bytes, ascending.
        repeats: timed runs of each, after one warm-up.
        concurrent: the ranks of all groups that measure at the same time, because in training they
            share their nodes' links (the stages of a pipeline); None is this group only.
    """
    whole = concurrent or communicator.process_group(communicator.group.flat, 0)
    samples = []
    for mesh, axis in communicator.axes():
        group, size = communicator.process_group(mesh, axis), mesh.shape[axis]
        for primitive in EXECUTED:
            shortest_s = inf
            for num_bytes in sizes if size > 1 else ():
                seconds = _slowest_s(primitive, num_bytes, group, whole, device, repeats)
                samples.append(Sample(mesh.links[axis], primitive, size, num_bytes, seconds))
                shortest_s = min(shortest_s, seconds)
                if seconds > shortest_s + MAX_SLOWDOWN_S:
                    break  # never after the first: a fit needs two
    return samples


def _slowest_s(
    primitive: Primitive,
    num_bytes: int,
    group: dist.ProcessGroup,
    whole: dist.ProcessGroup,
    device: torch.device,
    repeats: int,
) -> float:
    size = dist.get_world_size(group)
    elements = num_bytes // 4 // size
    shape = (elements,) if primitive in GATHERING else (size, elements)
    tensor = torch.zeros(shape, device=device)
    seconds = []
    for _ in range(1 + repeats):
        dist.barrier(group=whole)
        start = perf_counter()
        PRIMITIVES[primitive](tensor, group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    slowest = torch.tensor(seconds[1:], dtype=torch.float64).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=whole)
    return median(slowest.tolist())


def fitted(samples: Sequence[Sample]) -> CollectiveCosts:
    """Fit alpha and beta for each class of link and primitive."""
    lines: dict[tuple[LinkClass, Primitive], list[tuple[float, float, float]]] = {}
    for s in samples:
        moved = moved_share(s.primitive, s.size) * s.num_bytes
        lines.setdefault((s.link, s.primitive), []).append((rounds(s.primitive, s.size), moved, s.seconds))
    costs = CollectiveCosts({key: fit(line) for key, line in lines.items()})
    return replace(costs, spread=spread_of([costs.sample_s(s) / s.seconds for s in samples], 1.0)) if samples else costs


def known_costs(communicator: Communicator, *, device: torch.device, cache: CostCache) -> CollectiveCosts | None:
    """Return the group's costs, from the cache or measured and cached. A collective call over the world.

    Groups with the same layout on their nodes measure together and share their costs.

    Returns:
        None for a group on one node that is not in the cache: plain collectives are fast there,
        and measuring would delay the start.
    """
    group = communicator.group
    key, first = topology_key(group, device.type), dist.get_rank() == group.ranks[0]
    if not current_job().is_real:
        return cache.read(key)  # times with emulated ranks are not measurements
    mine = (group.layout, cache.read(key) if first and not (len(group.layout) > 1 and cache.is_due(key)) else None)
    everyones: list[tuple[tuple[int, ...], CollectiveCosts | None]] = gather(mine, kinds=(CollectiveCosts,))
    known = {layout: costs for layout, costs in everyones if costs is not None}
    for layout in sorted({layout for layout, _ in everyones if len(layout) > 1} - known.keys()):
        alike = dist.new_group([rank for rank, (other, _) in enumerate(everyones) if other == layout])
        if layout == group.layout:
            known[layout] = fitted(measure(communicator, device=device, concurrent=alike))
            if first:
                cache.write(key, known[layout])
    return known.get(group.layout)
