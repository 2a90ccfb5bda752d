"""The engines that benchmarks compare: on ranks of one host, across sites, and with sharded data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

from weft.conf.schema import CommConfig

MANY = 32
"""TCP connections per pair of ranks that fill a link between sites."""
CHUNK_KB = 8
"""Size of a chunk between sites, small enough that each connection gets several of a tensor."""


@dataclass(frozen=True)
class Engine:
    """An engine with one of its schedules: a function of a module of this package, called on every rank.

    Attributes:
        schedule: kind of its schedule across sites, for the simulation.
        connections: TCP connections per pair of ranks across sites.
        cell: pipelines that share their uplinks.
        moves: number of plain collectives over the whole model in a sharded step without overlap.
        across: True if ranks of one node hold different pipeline stages, so that replicas are on different nodes.
    """

    title: str
    module: str
    function: str = "run"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = ""
    connections: int = 1
    cell: int = 1
    moves: tuple[str, ...] = ()
    across: bool = False

    def run(self, *case: Any) -> Any:
        """Run one rank of the engine."""
        return getattr(import_module(f"{__package__}.{self.module}"), self.function)(*case, **self.arguments)

    @property
    def is_weft(self) -> bool:
        """True for Weft's engine, whose ranks of one host exchange tensors through shared memory."""
        return self.module == "weft_engine"


def _torch(title: str, kind: str) -> Engine:
    return Engine(f"torch {title}", "torch_engines", arguments={"kind": kind})


def _weft(kind: str, placement: str, title: str = "", chunks: int = 0) -> Engine:
    arguments = {"kind": kind, "placement": placement, "chunks": chunks}
    return Engine(f"Weft {title or kind}", "weft_engine", arguments=arguments)


HOST: Mapping[str, Engine] = MappingProxyType(
    {
        "deepspeed-1f1b": Engine("DeepSpeed 1F1B", "deepspeed_engines", arguments={"is_folded": False}),
        "deepspeed-dualpipev": Engine("DeepSpeed DualPipeV", "deepspeed_engines", arguments={"is_folded": True}),
        "torch-1f1b": _torch("1F1B", "1f1b"),
        "torch-interleaved": _torch("Interleaved1F1B", "interleaved"),
        "torch-zbv": _torch("ZBV", "zbv"),
        "torch-dualpipev": _torch("DualPipeV", "dualpipev"),
        "weft-1f1b": _weft("1f1b", "straight"),
        "weft-zbv": _weft("zbv", "fold"),
        "weft-auto": _weft("auto", "fold"),
        "weft-auto-zbv": _weft("auto", "fold", "auto, ZBV's memory", chunks=2),
    }
)
"""Engines on ranks of one host."""


def _gloo(engine: Engine, schedule: str) -> Engine:
    # One context: point-to-point operations use one of all that there are.
    return replace(engine, title=f"{engine.title}, one connection", schedule=schedule)


def _weft_at_sites(schedule: str, cell: int) -> Engine:
    # Without TLS, as the engines that it is compared with.
    comm = CommConfig(connections=MANY, cell=cell, chunk_kb=CHUNK_KB, deadline_s=60.0, tls=False)
    title = f"Weft {schedule}, {MANY} connections" + (f", a cell of {cell}" if cell > 1 else "")
    arguments = {"kind": schedule, "placement": "straight", "comm": comm}
    return Engine(title, "weft_engine", arguments=arguments, schedule=schedule, connections=MANY, cell=cell)


SITES: Mapping[str, Engine] = MappingProxyType(
    {
        "deepspeed": _gloo(HOST["deepspeed-1f1b"], "1f1b"),
        "torch-gpipe": _gloo(_torch("GPipe", "gpipe"), "gpipe"),
        "torch-1f1b": _gloo(HOST["torch-1f1b"], "1f1b"),
        "weft-gpipe": _weft_at_sites("gpipe", 1),
        "weft-1f1b": _weft_at_sites("1f1b", 1),
        "weft-auto": _weft_at_sites("auto", 1),
        "weft-1f1b-cell": _weft_at_sites("1f1b", 3),
        "weft-auto-cell": _weft_at_sites("auto", 3),
    }
)
"""Engines across sites: a rank per node of an emulated WAN."""

_SHARDED = ("reduce_scatter", "all_gather")
_ON_DEMAND = (*_SHARDED, "all_gather")


def _moves(stage: int) -> tuple[str, ...]:
    return _ON_DEMAND if stage == 3 else _SHARDED


def _deepspeed_zero(stage: int) -> Engine:
    return Engine(f"DeepSpeed ZeRO-{stage}", "deepspeed_engines", "run_sharded", {"stage": stage}, moves=_moves(stage))


def _weft_zero(stage: int) -> Engine:
    return Engine(f"Weft ZeRO-{stage}", "weft_engine", "run_sharded", {"stage": stage}, moves=_moves(stage))


SHARDED: Mapping[str, Engine] = {
    "torch-ddp": Engine("torch DDP", "torch_engines", "run_ddp", moves=("all_reduce",)),
    "torch-fsdp2": Engine("torch FSDP2", "torch_engines", "run_fsdp2", moves=_ON_DEMAND),
    "deepspeed-1": _deepspeed_zero(1),
    "deepspeed-2": _deepspeed_zero(2),
    "deepspeed-3": _deepspeed_zero(3),
    "deepspeed-pipeline": Engine(
        "DeepSpeed ZeRO-1, 2 stages",
        "deepspeed_engines",
        "run_pipelined",
        {"num_stages": 2},
        moves=_SHARDED,
        across=True,
    ),
    "weft-1": _weft_zero(1),
    "weft-2": _weft_zero(2),
    "weft-3": _weft_zero(3),
    "weft-pipeline": Engine(
        "Weft ZeRO-1, 2 stages",
        "weft_engine",
        "run_sharded",
        {"stage": 1, "num_stages": 2},
        moves=_SHARDED,
        across=True,
    ),
}
"""Data-parallel engines; a pipeline's step without overlap leaves out its bubbles."""
OVER: Mapping[str, str] = {name: name.replace("weft", "deepspeed") for name in SHARDED if name.startswith("weft")}
"""DeepSpeed's engine that each of Weft's is compared with."""
PLAIN = Engine("plain collectives", "torch_engines", "run_plain")
