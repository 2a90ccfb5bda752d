"""The facts for a run's plan: sizes, speeds, links and collectives, each with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Protocol

from weft.comm.collectives import CollectiveCosts, Group, Primitive
from weft.comm.links import Hop
from weft.conf.features import entry, is_installed
from weft.conf.schema import ContextExchange
from weft.engine.layout import RankLayout
from weft.engine.models.sizes import ModelSizes
from weft.engine.planning.teacher_facts import TeacherFacts
from weft.engine.stages.cutting.split import StageSplit
from weft.pipeline.costs import LinkCost, PairCosts, StageCost
from weft.pipeline.workload import ModelWork

if TYPE_CHECKING:
    from weft.comm.links import LinkProfile

PROBED = "measured by the probe of the WAN"


@dataclass(frozen=True)
class Links:
    """The links between ranks.

    Attributes:
        wan: link between two sites that are not in ``pairs``.
        pairs: links of particular pairs of sites, by (from site, to site).
    """

    local: LinkCost = field(default_factory=LinkCost)
    wan: LinkCost = field(default_factory=LinkCost)
    pairs: tuple[tuple[tuple[int, int], LinkCost], ...] = ()

    def between(self, sites: range) -> tuple[tuple[tuple[int, int], LinkCost], ...]:
        """Return the links between ``sites``, a range of site numbers, renumbered to begin at 0."""
        return tuple(
            ((here - sites.start, there - sites.start), link)
            for (here, there), link in self.pairs
            if here in sites and there in sites
        )


@dataclass(frozen=True)
class AxisFacts:
    """Ranks that share the work of a layer along an axis.

    Attributes:
        group: the first of the axis's groups.
        costs: costs of collectives over the group, or None if they are unknown.
    """

    group: Group
    costs: CollectiveCosts | None

    def seconds(self, primitive: Primitive, num_bytes: float) -> float:
        """Return the seconds of a collective that overlaps with nothing.

        Raises:
            ValueError: the collective was not measured.
        """
        assert self.costs is not None
        return self.costs.step_s(primitive, self.group.flat.links[0], self.group.size, num_bytes)


class LayerStrands(Protocol):
    """A rank's computations and collectives inside of layers. See `weft.engine.strands`."""

    def pairs(self, axes: Mapping[str, AxisFacts], split: StageSplit, measured: Sequence[StageCost]) -> PairCosts:
        """Return the durations of pairs of virtual stages.

        Args:
            measured: costs of the stages. If empty, the speed of a rank is used.
        """


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run before its first step, measured or estimated.

    Attributes:
        model: weights of its parts.
        work: operations and bytes of a sequence in each layer, or None if the forward does not run without data.
        flops_per_s: FLOP/s that a rank reaches in practice, or None if the stages' costs are known.
        run: name of what is trained in the cache of speeds, or empty if a run's slots do not show a rank's speed.
        optimizer_bytes: bytes of state for each weight in Muon, with 8-bit moments or in the caller's optimiser, of the
            embedding, of each layer, and of what follows the layers; or None for another configured optimiser.
        padding: elements by which all stages' shards of a replica are padded, because Muon's matrices stay whole.
        device_bytes: smallest memory of a rank.
        device: type of the ranks' devices: cpu or cuda.
        stage_costs: known costs of the virtual stages, by their number. Without them, costs are estimated from the
            model and the speed.
        stage_pairs: known durations of strand pairs of these stages.
        strands: a rank's computations between the collectives inside of layers, and the traffic of these, or None if
            no ranks share layers, or their collectives' costs are unknown.
        axes: groups of ranks that share layers, by axis.
        keeps_frozen: whether the devices also store frozen weights in their original type, for the export.
        recomputes: whether layers are recomputed in the backward.
        exchange: the chosen context exchange, which is not auto.
        bytes_per_s: bytes that a rank reads and writes in a second, if element-wise operations may run again.
        host_bps: bits per second in each direction between a device and its host's memory, if activations go there.
        replica_nodes: the node of each rank of a data group, or its site if replicas are at several sites.
        collectives: costs of collectives over these replicas, or None if unknown.
        teacher: a teacher on each rank that computes the loss, or None without distillation.
        sources: source of each fact, by its name.
    """

    layout: RankLayout
    model: ModelSizes
    flops_per_s: float | None
    run: str = ""
    optimizer_bytes: tuple[float, ...] | None = None
    padding: float = 0.0
    device_bytes: float
    device: str = "cpu"
    stage_costs: dict[int, tuple[StageCost, ...]]
    stage_pairs: dict[int, PairCosts] = field(default_factory=dict)
    strands: LayerStrands | None = None
    axes: dict[str, AxisFacts] = field(default_factory=dict)
    keeps_frozen: bool = False
    recomputes: bool = False
    exchange: ContextExchange = ContextExchange.gather
    links: Links
    replica_nodes: tuple[int, ...]
    collectives: CollectiveCosts | None = None
    bytes_per_s: float = inf
    host_bps: float = inf
    work: ModelWork | None = None
    teacher: TeacherFacts | None = None
    sources: dict[str, str]

    @property
    def replicas(self) -> Group:
        """The first data group: ranks that hold the same weights."""
        return Group(self.layout.data_groups(0)[0], self.replica_nodes, self.layout.routes > 1)

    def with_links(self, profiles: Mapping[Hop, LinkProfile]) -> Facts:
        """Return the facts with the slowest probed link between each two sites, if no bandwidth is configured."""
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

    def with_axes(self, axes: dict[str, AxisFacts], source: str) -> Facts:
        """Return the facts with the groups that share layers."""
        return replace(self, axes=axes, sources=self.sources | {"axes": source})

    def with_strands(self, strands: LayerStrands, source: str) -> Facts:
        """Return the facts with a rank's work between the collectives inside of layers."""
        return replace(self, strands=strands, sources=self.sources | {"strands": source})

    def with_nodes(self, nodes: tuple[int, ...], source: str) -> Facts:
        """Return the facts with the node of each rank of a data group."""
        return replace(self, replica_nodes=nodes, sources=self.sources | {"replica_nodes": source})


def fact_kinds() -> tuple[type, ...]:
    """Return the types of the values in facts and plans, which their exchange between ranks needs."""
    return (Facts, *(entry("strands").KINDS if is_installed("strands") else ()))
