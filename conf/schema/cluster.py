"""Machines, the links between them, and transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from weft.conf.schema.ranges import COUNT, POSITIVE, Range


class ClusterManager(Enum):
    """The program that starts processes on hosts."""

    ssh = "ssh"
    slurm = "slurm"
    kubernetes = "kubernetes"
    local = "local"


@dataclass(kw_only=True)
class LinkConfig:
    """A link between two sites."""

    sites: list[str] = field(default_factory=list)
    """The two sites that the link joins."""
    latency_ms: float = 0.0
    """One-way delay in milliseconds."""
    bandwidth_mbps: float = 0.0
    """Bandwidth of a node's uplink in megabits per second; 0 probes it when the run starts."""
    pair_mbps: float = 0.0
    """Bandwidth between one pair of nodes in megabits per second, if the provider limits it below the
    uplinks'; 0 means no such limit."""


@dataclass(kw_only=True)
class SiteConfig:
    """A data centre."""

    name: str = ""
    """Name of the site in messages and plots."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of the site, named and ordered as in the hostfile."""
    ranks: int = 0
    """Pipeline ranks of the site if there is no hostfile (one machine, emulation); otherwise the
    hosts' slots decide."""
    nodes: int = 0
    """Number of hosts to request from slurm or kubernetes, without spares, or 0 if a hostfile names them."""
    spares: int = 0
    """Number of further hosts to request from slurm or kubernetes, which replace hosts that fail."""
    select: dict[str, str] = field(default_factory=dict)
    """Where slurm or kubernetes looks for the site's hosts: {partition: NAME} or {constraint: FEATURE} for slurm,
    labels of nodes for kubernetes."""


@dataclass(kw_only=True)
class SlurmConfig:
    """The settings of a Slurm job besides sites."""

    options: list[str] = field(default_factory=list)
    """Further options of sbatch, such as `--time=1-0`, `--account=NAME` or `--gpus-per-node=8`."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell before the run, such as `source .venv/bin/activate`."""


@dataclass(kw_only=True)
class KubernetesConfig:
    """The settings of a JobSet besides sites."""

    image: str = ""
    """Container image that has weft installed; needed to write a JobSet."""
    namespace: str = "default"
    """Namespace of everything that is written."""
    key_secret: str = "weft-key"
    """Secret whose entry WEFT_KEY is the job's key; it has to be there already."""
    claim: str = ""
    """Persistent volume claim for train.output_dir and checkpoints, shared by all pods; needed to write a JobSet."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource of which each pod gets one per rank, or empty for CPUs."""


@dataclass(kw_only=True)
class ClusterConfig:
    """Machines and the links between them."""

    sites: list[SiteConfig] = field(default_factory=list)
    """Sites in pipeline order; empty means a single site."""
    routes: list[list[str]] = field(default_factory=list)
    """Sets of equally many replicas that go through sites of their own, each as the names of its sites in pipeline
    order; `sites` lists them in the same order. Each set's gradients are reduced inside of its sites, then over the
    WAN. Empty means that all replicas go through all sites."""
    links: list[LinkConfig] = field(default_factory=list)
    """Links between sites."""
    hostfile: str = ""
    """DeepSpeed hostfile (`host slots=N` lines); empty means this machine only."""
    ranks: Annotated[int, COUNT] = 1
    """Processes on this machine if there is no hostfile; with slurm and kubernetes, on each host."""
    master_addr: str = "127.0.0.1"
    """Rendezvous address of the ranks."""
    master_port: Annotated[int, Range(0, 65535)] = 29500
    """Rendezvous port of the ranks, and unless `comm.port` or `supervise.port` is set the one TCP port of each
    host for other hosts, which a firewall has to let pass; 0 picks a free one (one machine only)."""
    manager: ClusterManager = ClusterManager.ssh
    """Program that starts processes on the hosts: ssh (from the hostfile), slurm or kubernetes; local runs every host
    of the hostfile on this machine, to try out a run of several."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """Options of a job of slurm."""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    """Options of a JobSet."""
    spares: list[str] = field(default_factory=list)
    """Hosts of the hostfile that wait to take the place of one that is evicted."""
    deny_list: str = ""
    """File of the hosts that no run takes, kept by `weft evict` and `weft readmit`; empty means
    `denied_hosts.json` in train.output_dir. Clusters that share a file system share one."""


@dataclass(kw_only=True)
class CommConfig:
    """Transfers between ranks."""

    timeout_s: Annotated[float, POSITIVE] = 600.0
    """Seconds after which an unfinished transfer stops the run with an error."""
    deadline_s: Annotated[float, POSITIVE] = 30.0
    """Seconds of silence after which a link between sites counts as failed."""
    connections: Annotated[int, Range(0, 1024)] = 0
    """TCP connections per pair of ranks of different sites; 0 probes each link when the run starts
    and takes the fewest that fill it."""
    tls: bool = True
    """Encrypt traffic between sites with TLS 1.3, keyed by WEFT_KEY. Turn it off only for private
    links: hidden states and gradients are then sent in the clear."""
    interface: str = ""
    """Network interface on which to listen for ranks of other sites; empty takes the one that reaches
    `cluster.master_addr`."""
    port: Annotated[int, Range(0, 65000)] = 0
    """TCP port of each host for ranks of other sites: the first rank of the host listens there for all of them; 0 takes
    `cluster.master_port` (under torchrun, or on loopback, any free one)."""
    chunk_kb: Annotated[int, Range(4, 4096)] = 128
    """Kibibytes that a connection between sites sends at a time. A tensor should fill all `connections`
    many times over: lower it if tensors are small and connections are many."""
    cell: Annotated[int, Range(1, 64)] = 1
    """Replicas per DP-cell, which pool their uplinks for transfers between sites; 1 disables pooling."""
