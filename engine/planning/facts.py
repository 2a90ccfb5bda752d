"""The facts that a run is planned from: sizes, speeds, links, collectives, each with where it is known from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from weft.comm.collectives import CollectiveCosts, Group
from weft.engine.planning.hops import Hop
from weft.engine.planning.layout import RankLayout
from weft.engine.stages.sizes import ModelSizes
from weft.pipeline.costs import LinkCost, StageCost
from weft.pipeline.strands.pairs import PairCosts

if TYPE_CHECKING:
    from weft.comm.wan.probe import LinkProfile

PROBED = "measured by the probe of the WAN"


@dataclass(frozen=True)
class Links:
    """What lies between ranks.

    Attributes:
        wan: between two sites, unless ``pairs`` names them.
        pairs: particular links by (from site, to site).
    """

    local: LinkCost = field(default_factory=LinkCost)
    wan: LinkCost = field(default_factory=LinkCost)
    pairs: tuple[tuple[tuple[int, int], LinkCost], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run before its first step, measured or estimated.

    Attributes:
        layout: the ranks.
        model: weights of its parts.
        flops_per_s: what a rank reaches in practice; None where the stages' costs are known.
        device_bytes: memory of the rank that has least.
        stage_costs: costs of the virtual stages by how many there are, where they are known; where
            there are none, they are estimated from the model and the speed.
        stage_pairs: what strand pairs of these stages take, where that is known, too.
        links: between ranks.
        replica_nodes: the node of each rank of a data group: those that hold the same weights.
        collectives: costs of collectives over these replicas; None where they are not known.
        sources: where each of these is known from, by its name.
    """

    layout: RankLayout
    model: ModelSizes
    flops_per_s: float | None
    device_bytes: float
    stage_costs: dict[int, tuple[StageCost, ...]]
    stage_pairs: dict[int, PairCosts] = field(default_factory=dict)
    links: Links
    replica_nodes: tuple[int, ...]
    collectives: CollectiveCosts | None = None
    sources: dict[str, str]

    @property
    def replicas(self) -> Group:
        """The first data group."""
        return Group(self.layout.data_groups(0)[0], self.replica_nodes)

    def with_links(self, profiles: Mapping[Hop, LinkProfile]) -> Facts:
        """With the slowest link that was probed between each two sites, where no bandwidth is known."""
        known = dict(self.links.pairs)
        found: dict[tuple[int, int], LinkCost] = {}
        for (sender, receiver), profile in profiles.items():
            pair = (self.layout.position(sender).site, self.layout.position(receiver).site)
            before = known.get(pair, LinkCost())
            if before.bandwidth_bps < inf:
                continue
            slowest = min(profile.training_bps, found.get(pair, before).bandwidth_bps)
            found[pair] = replace(
                before, latency_s=profile.latency_s, bandwidth_bps=slowest, streams=profile.connections
            )
        if not found:
            return self
        named = ", ".join(f"{here} to {there}" for here, there in sorted(found))
        source = f"{self.sources['links']}; sites {named}: {PROBED}"
        links = replace(self.links, pairs=tuple({**known, **found}.items()))
        return replace(self, links=links, sources=self.sources | {"links": source})

    def with_nodes(self, nodes: tuple[int, ...], source: str) -> Facts:
        """With the node of each rank of a data group."""
        return replace(self, replica_nodes=nodes, sources=self.sources | {"replica_nodes": source})
