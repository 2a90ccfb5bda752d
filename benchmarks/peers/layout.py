"""Layouts: emulated layers on ranks of one host, or on sites of a netbed with one node per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.registry import CHUNK_KB, MANY
from weft.comm.links import LinkProfile
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
from weft.pipeline.costs import LinkCost
from weft.recipes.emulation.what_if import WhatIf
from weft.tools.links import Way, measure_link
from weft.tools.netbed import NetBed, Topology
from weft.tools.netbed.probing import probe_nodes

NUM_LAYERS = 8
LATENCY_MS, UPLINK_MBPS, WINDOW_KB = 20.0, 50.0, 50.0
"""Figures of a netbed: one way between sites; of a node; of a connection's receive buffer."""
_PROBE_BYTES = 32 << 10  # little enough for one connection
_WARM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Links:
    """The measured links between ranks on one host, between nodes of a site, and between sites."""

    local: LinkCost = field(default_factory=LinkCost)
    near: LinkCost = field(default_factory=LinkCost)
    wan: LinkCost = field(default_factory=LinkCost)


@dataclass(frozen=True)
class Layout:
    """A layout of the model on ranks.

    Attributes:
        sites: pipeline ranks at each site of a netbed, where every rank is a node; empty is one host.
        layers: number of layers of each virtual stage; empty is even.
        cell: replicas that share their uplinks.
        slow: a global rank and its speed over that of the others.
        bandwidth: factor on the bandwidth of uplinks.
        jitter_ms: maximum extra delay of a message between sites.
    """

    name: str
    stages: int = 4
    replicas: int = 1
    microbatches: int = 8
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
        """The number of ranks of all replicas."""
        return self.stages * self.replicas

    @property
    def what_if(self) -> WhatIf:
        """The emulation's conditions that differ from the links and layers as measured."""
        slow = dict([self.slow]) if self.slow else {}
        return WhatIf(slow=slow, bandwidth=self.bandwidth, jitter_ms=self.jitter_ms)

    def case(self, links: Links, steps: int, work: EmulatedWork) -> EngineCase:
        """Return the case of this layout's layers."""
        return EngineCase(
            num_ranks=self.stages,
            num_layers=NUM_LAYERS,
            num_microbatches=self.microbatches,
            num_replicas=self.replicas,
            work=work,
            link=links.near if self.sites else links.local,
            sites=self.sites if len(self.sites) > 1 else (),
            wan=links.wan,
            in_a_row=True,
            num_warmup=_WARM_STEPS,
            num_steps=steps,
        )

    def config(self, cache_dir: str, *, timeout_s: float) -> WeftConfig:
        """Return the configuration, without a timed search for a schedule."""
        pipeline = PipelineConfig(
            stages=self.stages,
            schedule=ScheduleKind[self.schedule],
            placement=PlacementKind[self.placement],
            layers=list(self.layers),
            microbatches=self.microbatches,
            search_seconds=0.0,
        )
        config = WeftConfig(pipeline=pipeline, comm=CommConfig(timeout_s=timeout_s, cell=self.cell))
        if self.sites:
            config.comm = replace(config.comm, connections=MANY, chunk_kb=CHUNK_KB, deadline_s=timeout_s, tls=False)
            config.optimizer = OptimizerConfig(clip=0.0)  # the norm would end every step with a crossing of the WAN
        if len(self.sites) > 1:
            sites = [SiteConfig(name=f"site {number}", ranks=ranks) for number, ranks in enumerate(self.sites)]
            config.cluster = ClusterConfig(sites=sites)
        config.zero.stage = self.zero
        config.data.cache_dir = cache_dir
        return config

    def topology(
        self, rate_mbps: float = UPLINK_MBPS, latency_ms: float = LATENCY_MS, window_kb: float = WINDOW_KB
    ) -> Topology:
        """Return the netbed that the layout runs on, with one node per rank, in order.

        Packets vary either way, so the latency has half of the jitter.
        """
        nodes = [count * self.replicas for count in self.sites]
        bed = wan_topology(nodes, rate_mbps * self.bandwidth, latency_ms + self.jitter_ms / 2, window_kb)
        return replace(bed, links=tuple(replace(link, jitter_ms=self.jitter_ms / 2) for link in bed.links))


def wan_topology(
    nodes: Sequence[int], rate_mbps: float = UPLINK_MBPS, latency_ms: float = LATENCY_MS, window_kb: float = WINDOW_KB
) -> Topology:
    """Return a netbed with these numbers of nodes per site; its queues hold the windows of many connections."""
    return Topology.even(
        nodes, uplink_mbps=rate_mbps, latency_ms=latency_ms, mtu=1500, window_kb=window_kb, queue_ms=200.0
    )


def profile(bed: NetBed) -> LinkProfile:
    """Measure one and up to `MANY` connections from the first node to the last, in one and in both directions."""
    effort = {"connections": MANY, "most": MANY, "seconds": 1.0, "message_bytes": _PROBE_BYTES}
    found, _ = probe_nodes(bed, bed.nodes[0], bed.nodes[-1], settings={"chunk_bytes": CHUNK_KB << 10}, **effort)
    return found


def measured_links(topology: Topology, work: EmulatedWork) -> Links:
    """Measure links inside of a site and between sites, with pauses as long as a layer."""
    with NetBed.up(topology) as bed:
        wan = profile(bed)
        pair = partial(run_ranks_in, bed, bed.nodes[:2])
        near = measure_link(work.hidden_bytes, Way.network, run=pair, idle_s=work.forward_s)
    return Links(near=near, wan=LinkCost(latency_s=wan.latency_s, bandwidth_bps=wan.training_bps, streams=MANY))
