"""The engines that a benchmark can run, by name, and running one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from benchmarks.peers.case import EngineCase, RankRun
from benchmarks.peers.emulated_stage import layers_per_stage
from weft.pipeline.schedule import Schedule
from weft.pipeline.serialization import schedule_from_csv
from weft.pipeline.simulation import simulate
from weft.pipeline.timeline import Timeline
from weft.tools.ranks import run_ranks

START_S = 60.0
"""Allowance for starting the ranks of a run."""
SLOWNESS = 10.0
"""How many times its ideal a step may take before the run is given up."""


@dataclass(frozen=True)
class Peer:
    """An engine with one of its schedules: a function of a module beside this one, called on every rank."""

    title: str
    module: str
    function: str = "run"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def run(self, *case: Any) -> Any:
        """One rank of it."""
        return getattr(import_module(f"{__package__}.{self.module}"), self.function)(*case, **self.arguments)

    @property
    def shares_memory(self) -> bool:
        """True if its ranks hand tensors on through shared memory, as Weft's of one host do."""
        return self.module == "weft_engine"


def _torch(title: str, kind: str) -> Peer:
    return Peer(f"torch {title}", "torch_engines", arguments={"kind": kind})


def _weft(kind: str, placement: str = "straight", title: str = "", chunks: int = 0) -> Peer:
    arguments = {"kind": kind, "placement": placement, "chunks": chunks}
    return Peer(f"Weft {title or kind}", "weft_engine", arguments=arguments)


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "deepspeed-1f1b": Peer("DeepSpeed 1F1B", "deepspeed_engines", "run_1f1b"),
        "deepspeed-dualpipev": Peer("DeepSpeed DualPipeV", "deepspeed_engines", "run_dualpipev"),
        "torch-1f1b": _torch("1F1B", "1f1b"),
        "torch-interleaved": _torch("Interleaved1F1B", "interleaved"),
        "torch-zbv": _torch("ZBV", "zbv"),
        "torch-dualpipev": _torch("DualPipeV", "dualpipev"),
        "weft-1f1b": _weft("1f1b"),
        "weft-interleaved": _weft("interleaved"),
        "weft-w": _weft("w", "fold"),
        "weft-zbv": _weft("zbv", "fold"),
        "weft-dualpipev": _weft("dualpipev", "fold"),
        "weft-auto": _weft("auto", "fold"),
        "weft-auto-zbv": _weft("auto", "fold", "auto, ZBV's memory", chunks=2),
        "weft-auto-straight": _weft("auto", "straight", "auto, straight"),
    }
)


@dataclass(frozen=True)
class PeerRun:
    """One run of a peer on a case: measured steps, and its own schedule simulated.

    Attributes:
        step_s: measured steps.
        ideal_s: its schedule simulated with free communication.
        simulated_s: its schedule simulated with the link as measured.
        profiled_s: the same with what its computations took in the warm-up; None if it tells no such.
        live_layers: per rank, most layer activations alive at once in that schedule.
    """

    step_s: tuple[float, ...]
    ideal_s: float
    simulated_s: float
    profiled_s: float | None
    live_layers: tuple[int, ...]


def measure(peer: str, case: EngineCase) -> PeerRun:
    """Run a peer once, in fresh processes.

    Raises:
        RuntimeError: a rank failed, or the run took too long.
    """
    timeout_s = START_S + SLOWNESS * (case.num_warmup + case.num_steps) * serial_s(case) / case.num_ranks
    ranks = run_ranks(case.num_ranks, PEERS[peer].run, case, timeout_s, timeout_s=timeout_s)
    schedule = _schedule(peer, ranks)
    num_stages = schedule.placement.num_stages
    ideal = simulate(schedule, case.work.costs(case.num_layers, num_stages))
    linked = simulate(schedule, case.work.costs(case.num_layers, num_stages, local=case.link))
    profile = ranks[0].profile
    profiled_s = None if profile is None else _end_s(simulate(schedule, profile))
    each = layers_per_stage(case.num_layers, num_stages)
    live_layers = tuple(each * chunks for chunks in ideal.live_microbatches)
    return PeerRun(ranks[0].step_s, _end_s(ideal), _end_s(linked), profiled_s, live_layers)


def _end_s(timeline: Timeline) -> float:
    return max(span.end_s for span in timeline.spans)


def serial_s(case: EngineCase) -> float:
    """Seconds of all computation of a step."""
    work = case.work
    return case.num_layers * case.num_microbatches * (work.forward_s + work.input_s + work.weight_s)


def _schedule(peer: str, ranks: Sequence[RankRun]) -> Schedule:
    """What the ranks executed; the engines run the halves of a pair one after the other."""
    schedule = schedule_from_csv("\n".join(",".join(rank.cells) for rank in ranks), name=peer)
    return schedule.with_rows([[(action,) for action in schedule.actions(rank)] for rank in range(schedule.num_ranks)])
