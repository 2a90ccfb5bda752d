"""Engines on several sites: a rank per node of an emulated WAN, and what its uplinks carry meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase, RankRun
from benchmarks.peers.rendezvous import PROGRAMS, Program
from benchmarks.peers.table import Peer
from benchmarks.peers.uplinks import Uplinks
from weft.comm.wan.probe import LinkProfile
from weft.conf.schema import CommConfig
from weft.tools.netbed import NetBed
from weft.tools.netbed.probing import probe_nodes

_PROBE_BYTES = 32 << 10  # little enough for one connection
_CHUNK_KB = 8  # so that each of many connections gets some of a tensor


@dataclass(frozen=True, kw_only=True)
class WanPeer(Peer):
    """An engine, and how it reaches other sites."""

    schedule: str | Program
    """For the simulation: the kind of its schedule, or what its ranks do where transfers are gloo's."""
    connections: int = 1
    """TCP connections per pair of ranks; of gloo, contexts."""
    cell: int = 1
    """Pipelines that share their uplinks."""
    environment: Mapping[str, str] = field(default_factory=dict)


def _gloo(title: str, module: str, function: str, contexts: int, **arguments: Any) -> WanPeer:
    named = f"{title}, {contexts} gloo context{'s' * (contexts > 1)}"
    interfaces = {"GLOO_SOCKET_IFNAME": ",".join(["lan0"] * contexts)}
    program = PROGRAMS[title]
    return WanPeer(named, module, function, arguments, schedule=program, connections=contexts, environment=interfaces)


def _weft(schedule: str, connections: int, cell: int) -> WanPeer:
    # In the clear, as the engines beside it.
    comm = CommConfig(connections=connections, cell=cell, chunk_kb=_CHUNK_KB, deadline_s=60.0, tls=False)
    how = f"{connections} connections" + (f", a cell of {cell}" if cell > 1 else "")
    arguments = {"kind": schedule, "placement": "straight", "comm": comm}
    title = f"Weft {schedule}, {how}"
    return WanPeer(title, "weft_engine", arguments=arguments, schedule=schedule, connections=connections, cell=cell)


_DEEPSPEED = ("DeepSpeed 1F1B", "deepspeed_engines", "run_1f1b")
_TORCH = "torch_engines"
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


def profile(bed: NetBed) -> LinkProfile:
    """What one and up to `MANY` connections carry from the first node to the last, alone and opposed."""
    effort = {"connections": MANY, "most": MANY, "seconds": 1.0, "message_bytes": _PROBE_BYTES}
    found, _ = probe_nodes(bed, bed.nodes[0], bed.nodes[-1], settings={"chunk_bytes": _CHUNK_KB << 10}, **effort)
    return found


def run_on(bed: NetBed, peer: WanPeer, case: EngineCase, *, timeout_s: float) -> tuple[list[RankRun], Uplinks]:
    """Run an engine once, each rank in its node, and watch the uplinks.

    Raises:
        RuntimeError, TimeoutError: as of `run_ranks_in`.
    """
    uplinks = Uplinks(bed)
    runs = run_ranks_in(
        bed,
        bed.nodes,
        peer.run,
        case,
        timeout_s,
        timeout_s=timeout_s,
        meanwhile=uplinks.sample,
        environment=peer.environment,
    )
    return runs, uplinks
