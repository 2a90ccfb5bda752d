"""Ranks that probe the collectives of their world, or of its pairs."""

from __future__ import annotations

import torch.distributed as dist

from weft.comm.collectives import CollectiveCosts, Group
from weft.comm.collectives.cache import CostCache
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.probe import fitted, known_costs, measure, nodes_of_world
from weft.engine.distributed import init_distributed

BYTES = 1 << 15
"""Bytes of the larger workload that `probe_here` tries."""


def probe_here() -> tuple[tuple[int, ...], CollectiveCosts]:
    """The node of each rank, and the costs that were found."""
    device = init_distributed(60.0)
    nodes = nodes_of_world()
    group = Group(tuple(range(dist.get_world_size())), nodes)
    communicator = Communicator.open([group], device=device, timeout_s=60.0)
    return nodes, fitted(measure(communicator, device=device, sizes=(1 << 11, BYTES)))


def probe_pairs(cache_dir: str) -> CollectiveCosts | None:
    """Return the probed costs of the pairs of ranks 0 and 1, 2 and 3, and so on."""
    device = init_distributed(60.0)
    nodes = nodes_of_world()
    pairs = [Group((rank, rank + 1), nodes[rank : rank + 2]) for rank in range(0, dist.get_world_size(), 2)]
    communicator = Communicator.open(pairs, device=device, timeout_s=60.0)
    assert communicator is not None, "every rank is in a pair"
    return known_costs(communicator, device=device, cache=CostCache.in_folder(cache_dir))
