"""Engines on several sites: a rank per node of an emulated WAN, and what its uplinks carry meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import Event, Thread
from time import perf_counter
from types import MappingProxyType
from typing import Any

from weft.comm.wan.key import VARIABLE
from weft.comm.wan.probe import LinkProfile
from weft.conf.schema import CommConfig
from weft.tools.benchmarks.peers.case import Case, RankRun
from weft.tools.benchmarks.peers.rendezvous import PROGRAMS, Program
from weft.tools.benchmarks.peers.table import Peer
from weft.tools.netbed import Job, Link, NetBed, Node, Topology
from weft.tools.netbed.probing import probe_nodes

KEY = "the key of a bed that nobody else can reach"
_PORT = 29500
_SAMPLE_S = 0.02
_PROBE_BYTES = 32 << 10  # little enough for one connection
_CHUNK_KB = 8  # so that each of many connections gets some of a tensor


@dataclass(frozen=True, kw_only=True)
class WanPeer:
    """An engine, and how it reaches other sites."""

    engine: Peer
    schedule: str | Program
    """For the simulation: the kind of its schedule, or what its ranks do where transfers are gloo's."""
    connections: int = 1
    """TCP connections per pair of ranks; of gloo, contexts."""
    cell: int = 1
    """Pipelines that share their uplinks."""
    environment: Mapping[str, str] = field(default_factory=dict)


def _gloo(title: str, module: str, function: str, contexts: int, **arguments: Any) -> WanPeer:
    engine = Peer(f"{title}, {contexts} gloo context{'s' * (contexts > 1)}", module, function, arguments)
    interfaces = {"GLOO_SOCKET_IFNAME": ",".join(["lan0"] * contexts)}
    return WanPeer(engine=engine, schedule=PROGRAMS[title], connections=contexts, environment=interfaces)


def _weft(schedule: str, connections: int, cell: int) -> WanPeer:
    # In the clear, as the engines beside it.
    comm = CommConfig(connections=connections, cell=cell, chunk_kb=_CHUNK_KB, deadline_s=60.0, tls=False)
    how = f"{connections} connections" + (f", a cell of {cell}" if cell > 1 else "")
    arguments = {"kind": schedule, "placement": "straight", "comm": comm}
    engine = Peer(f"Weft {schedule}, {how}", "weft.tools.benchmarks.peers.weft_engine", "run", arguments)
    return WanPeer(engine=engine, schedule=schedule, connections=connections, cell=cell)


_DEEPSPEED = ("DeepSpeed 1F1B", "weft.tools.benchmarks.peers.deepspeed_engines", "run_1f1b")
_TORCH = "weft.tools.benchmarks.peers.torch_engines"
MANY = 32

WAN_PEERS: Mapping[str, WanPeer] = MappingProxyType(
    {
        "deepspeed": _gloo(*_DEEPSPEED, 1),
        "torch-gpipe": _gloo("torch GPipe", _TORCH, "run", 1, kind="gpipe"),
        "torch-1f1b": _gloo("torch 1F1B", _TORCH, "run", 1, kind="1f1b"),
        "deepspeed-4": _gloo(*_DEEPSPEED, 4),
        "torch-gpipe-4": _gloo("torch GPipe", _TORCH, "run", 4, kind="gpipe"),
        "torch-1f1b-4": _gloo("torch 1F1B", _TORCH, "run", 4, kind="1f1b"),
        "weft-gpipe": _weft("gpipe", MANY, 1),
        "weft-1f1b": _weft("1f1b", MANY, 1),
        "weft-auto": _weft("auto", MANY, 1),
        "weft-1f1b-cell": _weft("1f1b", MANY, 3),
        "weft-auto-cell": _weft("auto", MANY, 3),
    }
)


@dataclass(frozen=True)
class Uplinks:
    """What each node had sent to other sites, over time.

    Attributes:
        at_s: times of the samples, on the clock of `time.perf_counter`.
        sent_bytes: by node, at those times.
    """

    at_s: list[float]
    sent_bytes: dict[str, list[int]]


def topology(case: Case, *, rate_mbps: float, latency_ms: float, window_kb: float) -> Topology:
    """A node per rank, in the order of ranks; every pair of sites equally far apart."""
    names = [chr(ord("a") + site) for site in range(len(case.sites))]
    return Topology(
        name=f"sites{os.getpid()}",
        nodes=tuple(
            Node(name=f"{name}{number}", site=f"site-{name}", uplink_mbps=rate_mbps)
            for name, ranks in zip(names, case.sites, strict=True)
            for number in range(ranks * case.num_replicas)
        ),
        links=tuple(
            Link(sites=(f"site-{a}", f"site-{b}"), latency_ms=latency_ms) for a in names for b in names if a < b
        ),
        mtu=1500,
        window_kb=window_kb,
        queue_ms=200.0,  # holds a window of each of many connections, which start a transfer together
    )


def profile(bed: NetBed) -> LinkProfile:
    """What one and up to `MANY` connections carry from the first node to the last, alone and opposed."""
    effort = {"connections": MANY, "most": MANY, "seconds": 1.0, "message_bytes": _PROBE_BYTES}
    found, _ = probe_nodes(bed, bed.nodes[0], bed.nodes[-1], settings={"chunk_bytes": _CHUNK_KB << 10}, **effort)
    return found


def run_on(bed: NetBed, peer: WanPeer, case: Case, *, timeout_s: float) -> tuple[list[RankRun], Uplinks]:
    """Run an engine once, each rank in its node, and watch the uplinks.

    Raises:
        RuntimeError: a rank failed.
        TimeoutError: the run took too long.
    """
    run = partial(getattr(import_module(peer.engine.module), peer.engine.function), **peer.engine.arguments)
    shared = {
        "WORLD_SIZE": str(len(bed.nodes)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": bed.address(bed.nodes[0]),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": "lan0",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        VARIABLE: KEY,
        **peer.environment,
    }
    jobs = [
        Job(bed, node, _rank, {**shared, "RANK": str(rank)}, run, case, timeout_s)
        for rank, node in enumerate(bed.nodes)
    ]
    ended = Event()
    uplinks = Uplinks([], {node: [] for node in bed.nodes})
    watch = Thread(target=_watch, args=(bed, uplinks, ended))
    watch.start()
    try:
        return [job.result(timeout_s) for job in jobs], uplinks
    finally:
        ended.set()
        watch.join()
        for job in jobs:
            job.kill()


def _rank(
    _say: Callable, _hear: Callable, environment: Mapping[str, str], run: Callable, case: Case, timeout_s: float
) -> RankRun:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    return run(case, timeout_s)


def _watch(bed: NetBed, uplinks: Uplinks, ended: Event) -> None:
    while not ended.wait(_SAMPLE_S):
        nodes = bed.status().nodes
        uplinks.at_s.append(perf_counter())
        for node in nodes:
            uplinks.sent_bytes[node.name].append(node.sent_bytes)
