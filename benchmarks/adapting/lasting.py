"""A rank, link or replica that becomes slow for good: steps before and after the change, and of 1F1B, by turns."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.adapting.disturbance import LINK_SHARE, SITES, SLOW_RANK, SPEED, adaptive_config, real_time, timed_step
from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout, Links, wan_topology
from benchmarks.peers.registry import MANY
from benchmarks.peers.weft_engine import emulated_engine, set_speed
from weft.conf.schema import ScheduleKind, WeftConfig
from weft.engine.engine import WeftEngine
from weft.engine.planning.schedules import plan_schedule
from weft.pipeline.costs import LinkCost
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate
from weft.tools.netbed import NetBed
from weft.tools.ranks import run_ranks

ADAPT_STEPS = 5
"""Steps that must deviate: few, so that a case ends soon."""
_DISTURBED_AT, _MOST_STEPS = 10, 60
_TURN_STEPS = 3
"""Steps that a schedule runs in a row. The first is not counted: it overlaps with the last one of another schedule."""


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """A case with a large simulated gain, straight on two sites of two ranks, or replicas of two ranks on one host.

    Attributes:
        chunks: cap of a rank's activations. 1F1B needs one for each stage.
        transfer: seconds of a transfer between the sites over those of a stage's forward.
    """

    microbatches: int
    chunks: int
    transfer: float
    replicas: int = 1

    def layout(self, name: str) -> Layout:
        """Return the layout of the case's ranks."""
        if self.replicas > 1:
            stages = 4 // self.replicas
            return Layout(name, schedule="auto", stages=stages, replicas=self.replicas, microbatches=self.microbatches)
        return Layout(name, schedule="auto", zero=0, sites=SITES, microbatches=self.microbatches)


CASES = {
    "rank": Lasting(microbatches=12, chunks=2, transfer=0.5),
    "link": Lasting(microbatches=12, chunks=4, transfer=1.5),
    "replica": Lasting(microbatches=8, chunks=2, transfer=0.5, replicas=2),
}


class Kind(NamedTuple):
    """A turn of all ranks: a schedule for each number of micro-batches, and the number of each replica."""

    schedules: tuple[Schedule, ...]
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The measurements of a rank.

    Attributes:
        before_s: seconds of steps before the disturbance.
        during_s: seconds of steps of the disturbance before the schedule changed.
        rounds_s: seconds of steps during the disturbance, by schedule and round.
        simulated_s: simulated steps with the measured costs, by schedule.
        proposals: the text of each plan, with the number of steps before it.
    """

    before_s: tuple[float, ...]
    during_s: tuple[float, ...]
    rounds_s: Mapping[str, tuple[tuple[float, ...], ...]]
    simulated_s: Mapping[str, float]
    proposals: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A case with a lasting disturbance.

    Attributes:
        before_s: median step before the disturbance.
        during_s: median step of the disturbance before the schedule changed.
        steps_s: median step by schedule, by turns during the disturbance: 1f1b if it fits, first and adapted.
        simulated_s: simulated steps with the measured costs, by schedule.
        gains: measured share of the step that the adapted schedule saves in each round of turns.
    """

    name: str
    before_s: float
    during_s: float
    steps_s: Mapping[str, float]
    simulated_s: Mapping[str, float]
    gains: tuple[float, ...]

    @property
    def paper(self) -> float:
        """The simulated share of the step that the adapted schedule saves."""
        return 1.0 - self.simulated_s["adapted"] / self.simulated_s["first"]

    @property
    def won(self) -> float:
        """The median measured gain over the gain on paper."""
        return median(self.gains) / self.paper

    @property
    def is_in_order(self) -> bool:
        """True if 1F1B is slowest and the adapted schedule fastest, by simulator and engine."""
        return all(
            list(times) == sorted(times, key=times.__getitem__, reverse=True)
            for times in (self.simulated_s, self.steps_s)
        )


def run_lasting(name: str, args: argparse.Namespace) -> Adapted:
    """Run a case whose rank, link between emulated sites, or replica becomes slow and stays so."""
    shape, each = CASES[name], args.layer / 1e3
    hidden_bytes = int(shape.transfer * 2 * each * args.rate * 1e6 / 8 / 4) * 4
    work = EmulatedWork(forward_s=each, input_s=each, weight_s=each, hidden_bytes=hidden_bytes)
    layout = shape.layout(name)
    wan = LinkCost(latency_s=args.latency / 1e3, bandwidth_bps=args.rate * 1e6, streams=MANY)
    case = layout.case(Links(wan=wan), 0, work)
    with tempfile.TemporaryDirectory(prefix="weft-adapt-") as folder:
        cap_bytes = shape.chunks * hidden_bytes
        config = adaptive_config(layout, folder, args, cap_bytes=cap_bytes, adapt_steps=ADAPT_STEPS)
        signal = Path(folder, "slow")
        arguments = case, config, name, str(signal), args.rounds
        if layout.sites:
            with real_time():
                up = NetBed.up(wan_topology(SITES, args.rate, args.latency))
            with up as bed:
                slow_link = partial(_slow_link, bed, signal)
                ranks = run_ranks_in(bed, bed.nodes, train, *arguments, timeout_s=args.timeout, meanwhile=slow_link)
        else:
            ranks = run_ranks(layout.ranks, train, *arguments, timeout_s=args.timeout)
    print(f"{name}: {ranks[SLOW_RANK]}", file=sys.stderr)
    return _adapted(name, ranks)


def _slow_link(bed: NetBed, signal: Path) -> None:
    """Slow the link between the sites down once the ranks have written ``signal``."""
    if signal.exists():
        signal.unlink()
        bed.slow("s0", "s1", by=LINK_SHARE)


def _adapted(name: str, ranks: Sequence[RankRun]) -> Adapted:
    rounds_s = {
        kind: [median(mean(rank.rounds_s[kind][turn]) for rank in ranks) for turn in range(len(turns))]
        for kind, turns in ranks[0].rounds_s.items()
    }
    return Adapted(
        name=name,
        before_s=median(s for rank in ranks for s in rank.before_s[2:]),
        during_s=median(s for rank in ranks for s in rank.during_s[1:]),
        steps_s={kind: median(turns) for kind, turns in rounds_s.items()},
        simulated_s=ranks[0].simulated_s,
        gains=tuple(1.0 - new / old for new, old in zip(rounds_s["adapted"], rounds_s["first"], strict=True)),
    )


def train(case: EngineCase, config: WeftConfig, name: str, signal: str, rounds: int) -> RankRun:
    """Train until the schedule has changed because of a disturbance, and then run all schedules by turns. Collective.

    Raises:
        RuntimeError: the schedule has not changed.
    """
    with real_time():
        return _train(emulated_engine(case, config), case, config, name, signal, rounds)


def _train(engine: WeftEngine, case: EngineCase, config: WeftConfig, name: str, signal: str, rounds: int) -> RankRun:
    try:
        first = engine.plan.schedules[1]
        before_s = tuple(timed_step(engine) for _ in range(_DISTURBED_AT))
        if (name == "rank" and engine.global_rank == SLOW_RANK) or (name == "replica" and engine.replica == 0):
            set_speed(engine, case.work, SPEED)
        if name == "link" and engine.global_rank == 0:
            Path(signal).touch()
        during_s: list[float] = []
        while engine.plan.schedules[1] is first:
            if len(during_s) == _MOST_STEPS:
                raise RuntimeError(f"{name}: no other schedule was chosen in {_MOST_STEPS} steps: {_proposals(engine)}")
            during_s.append(timed_step(engine))
        assert engine.adaptation is not None
        _, found = engine.adaptation.proposals[-1]
        kinds = {"first": Kind((first,)), "adapted": Kind(found.schedules, found.counts)}
        simulated_s = {"first": found.levels[0].step_s, "adapted": found.step_s()}
        costs, proposals = engine.adaptation.costs(), _proposals(engine)
        if case.num_replicas == 1 and config.pipeline.memory_cap_bytes >= case.num_ranks * case.work.hidden_bytes:
            other = _one_f_one_b(engine, config)
            kinds = {"1f1b": Kind((other,)), **kinds}
            simulated_s = {"1f1b": simulate(other, costs).step_s, **simulated_s}
        engine.adaptation.close()
        engine.adaptation = None  # from here on schedules change by turns
        rounds_s: dict[str, list[tuple[float, ...]]] = {name: [] for name in kinds}
        for name, kind in [*kinds.items()] * rounds:
            engine.run_schedules(*({1: schedule} for schedule in kind.schedules), counts=kind.counts)
            rounds_s[name].append(tuple(timed_step(engine) for _ in range(_TURN_STEPS))[1:])
        return RankRun(
            before_s=before_s,
            during_s=tuple(during_s),
            rounds_s={kind: tuple(turns) for kind, turns in rounds_s.items()},
            simulated_s=simulated_s,
            proposals=proposals,
        )
    finally:
        engine.destroy()


def _one_f_one_b(engine: WeftEngine, config: WeftConfig) -> Schedule:
    plan = engine.plan
    return plan_schedule(
        replace(config.pipeline, schedule=ScheduleKind["1f1b"]),
        plan.placement,
        num_microbatches=plan.schedules[1].num_microbatches,
        costs=plan.costs,
        zero_stage=config.zero.stage,
    )


def _proposals(engine: WeftEngine) -> tuple[tuple[int, str], ...]:
    assert engine.adaptation is not None
    return tuple((step, found.text()) for step, found in engine.adaptation.proposals)
