"""The jobs: emulated layers on 2 to 16 ranks of this machine, on one host or at sites of a netbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.conf.schema import (
    ClusterConfig,
    CommConfig,
    OptimizerConfig,
    PipelineConfig,
    PlacementKind,
    ScheduleKind,
    SiteConfig,
    WeftConfig,
)
from weft.engine.emulation.stage import EmulatedWork
from weft.pipeline.costs import LinkCost
from weft.tools.benchmarks.peers.case import EngineCase
from weft.tools.benchmarks.peers.sites import MANY
from weft.tools.emulation.what_if import WhatIf
from weft.tools.netbed import Topology

LAYER_MS = 60.0
"""Of a layer's forward and of each gradient. The host takes about 0.3 ms of a slot, and twice that where eight real
ranks share two processors, which emulated ones do not: of slots of 30 ms that alone is more than the goal."""
TIMEOUT_S = 280.0
LATENCY_MS, UPLINK_MBPS, WINDOW_KB = 20.0, 50.0, 50.0
"""Of the netbed: one way between sites; of a node; of a connection's receive buffer."""
_CHUNK_KB = 8  # so that each of many connections gets some of a tensor
_WARM_STEPS = 2


def work_of_layers(layer_ms: float) -> EmulatedWork:
    """What each layer of a job does."""
    seconds = layer_ms / 1e3
    return EmulatedWork(forward_s=seconds, input_s=seconds, weight_s=seconds, hidden_bytes=2**18, weight_elements=2**14)


@dataclass(frozen=True, kw_only=True)
class Links:
    """What lies between two ranks, as measured: on one host, between nodes of a site, between sites."""

    local: LinkCost
    near: LinkCost = field(default_factory=LinkCost)
    wan: LinkCost = field(default_factory=LinkCost)


@dataclass(frozen=True)
class Layout:
    """One job that can be run for real here.

    Attributes:
        sites: pipeline ranks at each site of a netbed, where every rank is a node; empty is one host.
        cell: replicas that share their uplinks.
        slow: a global rank and its speed over that of the others.
        bandwidth: of uplinks, over `UPLINK_MBPS`.
        jitter_ms: that a message between sites takes longer at most.
    """

    name: str
    stages: int = 4
    replicas: int = 1
    schedule: str = "1f1b"
    placement: str = "straight"
    zero: int = 1
    layers: tuple[int, ...] = ()
    sites: tuple[int, ...] = ()
    cell: int = 1
    slow: tuple[int, float] | None = None
    bandwidth: float = 1.0
    jitter_ms: float = 0.0

    @property
    def ranks(self) -> int:
        """Of all replicas."""
        return self.stages * self.replicas

    @property
    def what_if(self) -> WhatIf:
        """What an emulation is told to be different from the links and layers as measured."""
        slow = dict([self.slow]) if self.slow else {}
        return WhatIf(slow=slow, bandwidth=self.bandwidth, jitter_ms=self.jitter_ms)

    def case(self, links: Links, steps: int, work: EmulatedWork) -> EngineCase:
        """Its layers."""
        return EngineCase(
            num_ranks=self.stages,
            num_layers=8,
            num_replicas=self.replicas,
            work=work,
            link=links.near if self.sites else links.local,
            sites=self.sites,
            wan=links.wan,
            in_a_row=True,
            num_warmup=_WARM_STEPS,
            num_steps=steps,
        )

    def config(self, cache: str) -> WeftConfig:
        """Its settings."""
        pipeline = PipelineConfig(
            stages=self.stages,
            schedule=ScheduleKind[self.schedule],
            placement=PlacementKind[self.placement],
            layers=list(self.layers),
            microbatches=8,
            search_seconds=0.0,
        )
        config = WeftConfig(pipeline=pipeline, comm=CommConfig(timeout_s=TIMEOUT_S))
        if self.sites:
            sites = [SiteConfig(name=f"site {number}", ranks=ranks) for number, ranks in enumerate(self.sites)]
            config.cluster = ClusterConfig(sites=sites)
            config.comm = replace(
                config.comm, connections=MANY, chunk_kb=_CHUNK_KB, deadline_s=TIMEOUT_S, tls=False, cell=self.cell
            )
            config.optimizer = OptimizerConfig(clip=0.0)  # the norm would end every step with a crossing of the WAN
        config.zero.stage = self.zero
        config.data.cache_dir = cache
        return config

    def topology(self) -> Topology:
        """The netbed that it runs on, a node for each rank in their order."""
        return topology([count * self.replicas for count in self.sites], self.bandwidth, self.jitter_ms)


def topology(nodes: Sequence[int], bandwidth: float = 1.0, jitter_ms: float = 0.0) -> Topology:
    """A netbed of so many nodes at each site. Its packets vary either way, so its latency has half of the jitter."""
    bed = Topology.even(
        nodes,
        uplink_mbps=UPLINK_MBPS * bandwidth,
        latency_ms=LATENCY_MS + jitter_ms / 2,
        mtu=1500,
        window_kb=WINDOW_KB,
        queue_ms=200.0,
    )
    return replace(bed, links=tuple(replace(link, jitter_ms=jitter_ms / 2) for link in bed.links))


LAYOUTS = (
    Layout("straight"),
    Layout("w, fold", schedule="w", placement="fold"),
    Layout("site fold", schedule="w", placement="site_fold", sites=(2, 2)),
    Layout("cells of 2", replicas=2, sites=(2, 2), cell=2),
    Layout("eight stages", stages=8),
    Layout("uneven layers", layers=(3, 1, 3, 1)),
    Layout("interleaved", schedule="interleaved", placement="interleaved"),
    Layout("2 replicas, ZeRO-0", stages=2, replicas=2, zero=0),
    Layout("2 replicas, ZeRO-2", stages=2, replicas=2, zero=2),
    Layout("4 replicas, ZeRO-3", stages=2, replicas=4, zero=3),
    Layout("4 x 4", stages=4, replicas=4),
    Layout("straggler", slow=(2, 0.8)),
    Layout("two stages", stages=2),
    Layout("auto", schedule="auto", placement="fold"),
)
_LARGEST = Layout("4 x 4", stages=4, replicas=4)
_LARGEST_AT_SITES = Layout("4 x 2 at two sites", replicas=2, sites=(2, 2))
CHANGES = {
    "slow rank": (_LARGEST, replace(_LARGEST, name="4 x 4, a rank at 80 %", slow=(5, 0.8))),
    "jitter": (_LARGEST_AT_SITES, replace(_LARGEST_AT_SITES, name="4 x 2, 10 ms of jitter", jitter_ms=10.0)),
    "bandwidth": (_LARGEST_AT_SITES, replace(_LARGEST_AT_SITES, name="4 x 2, twice the bandwidth", bandwidth=2.0)),
}
"""A job as it is, and with one thing different, on the most ranks that run beside each other here."""
