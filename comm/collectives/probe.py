"""The probe of collectives: what each primitive takes along each axis of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.collective import GATHERING, REDUCING, Primitive
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.costs import CollectiveCosts, fit, moved_share, rounds
from weft.comm.collectives.group import LinkClass
from weft.comm.collectives.primitives import PRIMITIVES
from weft.comm.exchange import gather
from weft.comm.shared_channel import host_identity

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
"""Bytes of the workloads that are tried."""
LONG_S = 0.3
"""A primitive that more bytes made this much slower is not tried on still more."""


@dataclass(frozen=True)
class Sample:
    """A primitive along an axis of ``size`` ranks, all its sub-groups at once: the slowest rank's median."""

    link: LinkClass
    primitive: Primitive
    size: int
    num_bytes: int
    seconds: float


def nodes_of_world() -> tuple[int, ...]:
    """The node of each rank of the world, counted from 0; a collective call.

    Ranks in network namespaces of one machine are on nodes of their own.
    """
    hosts = gather(host_identity())
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(order[host] for host in hosts)


def measure(
    communicator: Communicator,
    *,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    repeats: int = 3,
    beside: dist.ProcessGroup | None = None,
) -> list[Sample]:
    """Time every primitive along every axis that is open; a collective call over the group.

    Args:
        sizes: bytes of the workloads, ascending.
        repeats: timed runs of each; one more goes before them.
        beside: ranks of all groups that measure at the same moment, as those of several pipeline
            stages that share their nodes' links do in training; None is this group alone.
    """
    whole = beside or communicator.process_group(communicator.group.flat, 0)
    samples = []
    for mesh, axis in communicator.axes():
        group, size = communicator.process_group(mesh, axis), mesh.shape[axis]
        for primitive in (Primitive.all_reduce, *sorted(REDUCING | GATHERING, key=lambda p: p.value)):
            shortest_s = inf
            for num_bytes in sizes if size > 1 else ():
                seconds = _slowest_s(primitive, num_bytes, group, whole, device, repeats)
                samples.append(Sample(mesh.links[axis], primitive, size, num_bytes, seconds))
                shortest_s = min(shortest_s, seconds)
                if seconds > shortest_s + LONG_S:
                    break  # never after the first: a line needs two
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
    """An alpha and a beta for each class of link and primitive."""
    lines: dict[tuple[LinkClass, Primitive], list[tuple[float, float, float]]] = {}
    for s in samples:
        moved = moved_share(s.primitive, s.size) * s.num_bytes
        lines.setdefault((s.link, s.primitive), []).append((rounds(s.primitive, s.size), moved, s.seconds))
    return CollectiveCosts({key: fit(line) for key, line in lines.items()})


def known_costs(communicator: Communicator, *, device: torch.device, cache: CostCache) -> CollectiveCosts | None:
    """The group's costs: from the cache, or measured now and put there; a collective call over the world.

    Groups that lie alike on their nodes measure together, and have the same costs.

    Returns:
        None for a group on one node that was not measured: there, plain collectives are fast,
        and a start without a probe is faster.
    """
    group = communicator.group
    key, first = topology_key(group, device.type), dist.get_rank() == group.ranks[0]
    mine = (group.layout, cache.read(key) if first else None)
    everyones: list[tuple[tuple[int, ...], CollectiveCosts | None]] = gather(mine, kinds=(CollectiveCosts,))
    known = {layout: costs for layout, costs in everyones if costs is not None}
    for layout in sorted({layout for layout, _ in everyones if len(layout) > 1} - known.keys()):
        alike = dist.new_group([rank for rank, (other, _) in enumerate(everyones) if other == layout])
        if layout == group.layout:
            known[layout] = fitted(measure(communicator, device=device, beside=alike))
            if first:
                cache.write(key, known[layout])
    return known.get(group.layout)
