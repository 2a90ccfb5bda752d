"""The data-parallel engines that `benchmarks zero` can run, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.table import Peer
from benchmarks.peers.zero_case import Technique, ZeroCase
from weft.conf.schema import Partition
from weft.tools.netbed import NetBed

SHARDED = ("reduce_scatter", "all_gather")
ON_DEMAND = (*SHARDED, "all_gather")
START_S = 60.0
PIPELINE_MICROBATCHES = 4
"""A rank's batch goes through a pipeline in so many pieces at least, or little but its fill would be seen."""
SLOWNESS = 4.0
"""How many times its step without overlap an engine may take before the run is given up."""


@dataclass(frozen=True, kw_only=True)
class ZeroPeer(Peer):
    """An engine, and what it moves.

    Attributes:
        moves: plain collectives over the whole model that a step without overlap takes.
        across: ranks of one node hold different pipeline stages, so that replicas are on different nodes.
    """

    moves: tuple[str, ...]
    across: bool = False


def _deepspeed(stage: int) -> ZeroPeer:
    moves = ON_DEMAND if stage == 3 else SHARDED
    return ZeroPeer(f"DeepSpeed ZeRO-{stage}", "deepspeed_engines", "run_sharded", {"stage": stage}, moves=moves)


def _weft(title: str, technique: Technique) -> ZeroPeer:
    moves = ON_DEMAND if technique.zero_stage == 3 else SHARDED
    across = technique.num_stages > 1
    return ZeroPeer(title, "zero_weft", arguments={"technique": technique}, moves=moves, across=across)


_WHOLE = Technique(layer_by_layer=False, weights_first=False)
ENGINES: Mapping[str, ZeroPeer] = {
    "torch-ddp": ZeroPeer("torch DDP", "zero_torch", "run_ddp", moves=("all_reduce",)),
    "torch-fsdp2": ZeroPeer("torch FSDP2", "zero_torch", "run_fsdp2", moves=ON_DEMAND),
    "deepspeed-1": _deepspeed(1),
    "deepspeed-2": _deepspeed(2),
    "deepspeed-3": _deepspeed(3),
    "deepspeed-pipeline": ZeroPeer(
        "DeepSpeed ZeRO-1, 2 stages",
        "deepspeed_engines",
        "run_pipelined",
        {"num_stages": 2},
        moves=SHARDED,
        across=True,
    ),
    "weft-1": _weft("Weft ZeRO-1", Technique()),
    "weft-2": _weft("Weft ZeRO-2", Technique(zero_stage=2)),
    "weft-3": _weft("Weft ZeRO-3", Technique(zero_stage=3)),
    "weft-pipeline": _weft("Weft ZeRO-1, 2 stages", Technique(num_stages=2, chunks=8)),
    "ablation-plain": _weft("plain", replace(_WHOLE, partition=Partition.none)),
    "ablation-primitive": _weft("+ primitive", replace(_WHOLE, partition=Partition.primitive)),
    "ablation-group": _weft("+ group", replace(_WHOLE, partition=Partition.group)),
    "ablation-workload": _weft("+ workload", Technique(weights_first=False)),
    "ablation-layer": _weft("+ layer tier", Technique()),
    "ablation-model": _weft("+ model tier", Technique(chunks=8)),
}
"""Every engine; the pipelines' step without overlap leaves out their bubbles."""
ABLATION = tuple(name for name in ENGINES if name.startswith("ablation"))
"""Weft with one technique after the other."""
OVER: Mapping[str, tuple[str, ...]] = {
    "weft-1": ("deepspeed-1",),
    "weft-2": ("deepspeed-2",),
    "weft-3": ("deepspeed-3",),
    "weft-pipeline": ("deepspeed-pipeline",),
}
"""For each of ours, DeepSpeed's that it is measured by."""
RACE = tuple(name for name in ENGINES if name not in ABLATION)
"""What is run unless engines are named."""
_PLAIN = ZeroPeer("plain collectives", "zero_torch", "run_plain", moves=())


def run_peer(
    name: str, bed: NetBed, nodes: Sequence[str], case: ZeroCase, meanwhile: Callable[[], object] | None = None
) -> Any:
    """What rank 0 of the engine measured; for ``plain``, seconds of each plain collective over the whole model.

    Raises:
        RuntimeError, TimeoutError: as of `run_ranks_in`.
    """
    peer = _PLAIN if name == "plain" else ENGINES[name]
    order = sorted(range(len(nodes)), key=lambda rank: (rank % 2, rank)) if peer.across else range(len(nodes))
    if peer.across:
        case = replace(case, num_microbatches=max(case.num_microbatches, PIPELINE_MICROBATCHES))
    timeout_s = START_S + SLOWNESS * (case.num_warmup + case.num_steps) * sum(case.compute_s, len(case.compute_s) * 2.0)
    return run_ranks_in(bed, [nodes[rank] for rank in order], peer.run, case, timeout_s=timeout_s, meanwhile=meanwhile)[
        0
    ]
