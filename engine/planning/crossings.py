"""The hops of a job between ranks, and those of them that cross the WAN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist

from weft.comm.wan import Cell
from weft.comm.wan.network import Hop, WanNetwork
from weft.comm.wan.probe import LinkProfile
from weft.conf.schema import ClusterConfig, CommConfig
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.placement import Placement


def hops(placement: Placement, num_replicas: int) -> tuple[set[Hop], set[Hop]]:
    """Directed pairs of global ranks that exchange tensors: inside a site, and between two.

    Replicas of a pipeline rank have neighbouring global ranks, as in `WeftModule`.
    """
    inside: set[Hop] = set()
    between: set[Hop] = set()
    for a, b in _neighbours(placement):
        crosses = placement.rank_sites[a] != placement.rank_sites[b]
        for replica in range(num_replicas):
            here, there = a * num_replicas + replica, b * num_replicas + replica
            (between if crosses else inside).update([(here, there), (there, here)])
    return inside, between


def cells(placement: Placement, num_replicas: int, size: int) -> list[Cell]:
    """The DP-cells of every crossing: ``size`` replicas each, by LocalDPRank; the last may hold fewer."""
    crossings = [(a, b) for a, b in _neighbours(placement) if placement.rank_sites[a] != placement.rank_sites[b]]
    return [
        Cell(tuple(a * num_replicas + r for r in members), tuple(b * num_replicas + r for r in members), number)
        for number, (a, b) in enumerate(crossings)
        for first in range(0, num_replicas, size)
        for members in (range(first, min(first + size, num_replicas)),)
    ]


@dataclass(frozen=True)
class Seat:
    """A replica's place in its DP-cell.

    Attributes:
        pipelines: of the cell; the last cell may hold fewer than the others.
        local_rank: LocalDPRank, from 0.
    """

    pipelines: int
    local_rank: int

    @classmethod
    def of(cls, replica: int, placement: Placement, num_replicas: int, size: int) -> Seat:
        """The seat of a replica; where nothing crosses the WAN, cells hold one."""
        if len(set(placement.rank_sites)) == 1:
            return cls(1, 0)
        local_rank = replica % size
        return cls(min(size, num_replicas - replica + local_rank), local_rank)

    @classmethod
    def all(cls, placement: Placement, num_replicas: int, size: int) -> list[Seat]:
        """The seats of all replicas, in their order."""
        return [cls.of(replica, placement, num_replicas, size) for replica in range(num_replicas)]


def open_wan(placement: Placement, comm: CommConfig, device: torch.device) -> WanNetwork | None:
    """The job's links between sites; None where no stage follows another at a different site.

    A collective call.
    """
    num_replicas = dist.get_world_size() // placement.num_ranks
    crossing = cells(placement, num_replicas, comm.cell)
    return WanNetwork.join(crossing, comm=comm, device=device) if crossing else None


def with_probed_links(
    costs: CostModel, cluster: ClusterConfig, placement: Placement, profiles: Mapping[Hop, LinkProfile]
) -> CostModel:
    """Costs with the slowest probed link of each pair of sites, where the configuration gives no bandwidth."""
    num_replicas = dist.get_world_size() // placement.num_ranks
    given = {tuple(link.sites) for link in cluster.links if link.bandwidth_mbps}
    names = [site.name for site in cluster.sites]
    links = dict(costs.wan_links)
    probed: dict[tuple[int, int], LinkCost] = {}
    for (sender, receiver), profile in profiles.items():
        here, there = (placement.rank_sites[rank // num_replicas] for rank in (sender, receiver))
        if {(names[here], names[there]), (names[there], names[here])} & given:
            continue
        slowest = min(profile.training_bps, probed.get((here, there), LinkCost()).bandwidth_bps)
        pair_bps = links.get((here, there), LinkCost()).pair_bps
        probed[here, there] = LinkCost(
            latency_s=profile.latency_s, bandwidth_bps=slowest, pair_bps=pair_bps, streams=profile.connections
        )
    links.update(probed)
    return replace(costs, wan_links=tuple(links.items()))


def _neighbours(placement: Placement) -> list[tuple[int, int]]:
    """Pairs of pipeline ranks with neighbouring stages, the lower rank first."""
    return sorted({(min(a, b), max(a, b)) for a, b in pairwise(placement.stage_ranks) if a != b})
