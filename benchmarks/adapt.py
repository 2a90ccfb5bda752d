"""A rank or a link that becomes slow while training: steps before, and during it without and with adaptation."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout, Links, measured_links, wan_topology
from benchmarks.peers.weft_engine import emulated_engine
from benchmarks.results import finish, parse, show
from weft.comm.wan.library import load
from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine
from weft.tools.netbed import NetBed
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

SITES = (2, 2)
SPEED, LINK_SHARE = 0.7, 3.0
"""A slow rank's speed over that of the others, and the factor by which a slow link's rate is divided."""
SLOW_RANK = 3
GOAL, MOST_SLOWER = 0.6, 1.02
"""Share of the gain on paper that must be measured, and the ratio to a run without adaptation that is allowed."""
NAMES = ("rank", "link", "quiet", "alternating")
ADAPT_STEPS, USUAL_STEPS = 10, 30
"""Steps that must deviate: few, so that a case ends soon; and the default, for cases that must not change."""
PERIOD = 20
"""Steps after which an alternating rank changes its speed."""
_CHUNKS = {"rank": 6, "link": 8}
"""Cap of a rank's activations in chunks, by case, under which another schedule gains on paper; others have ZB-V's 8."""
_AFTER = 12  # measured steps with the new schedule
_MOST_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The measurements of a rank.

    Attributes:
        step_s: seconds of each step, between the ends of consecutive steps.
        disturbed_at: number of steps before the disturbance, or 0 without one.
        plans: for each plan: steps before it, the chosen level, and the simulated steps of none and schedule.
    """

    step_s: tuple[float, ...]
    disturbed_at: int
    plans: tuple[tuple[int, str, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A case with a lasting disturbance.

    Attributes:
        before_s, without_s, with_s: median step before the disturbance, during it, and during it with another schedule.
        paper: simulated share of the step that the other schedule saves.
    """

    name: str
    before_s: float
    without_s: float
    with_s: float
    paper: float

    @property
    def gain(self) -> float:
        """The measured share of the step that the other schedule saves."""
        return 1.0 - self.with_s / self.without_s

    @property
    def won(self) -> float:
        """The measured gain over the gain on paper."""
        return self.gain / self.paper


@dataclass(frozen=True, kw_only=True)
class Steady:
    """A case in which the schedule must not change; ``ratio`` is of its median step to that without adaptation."""

    name: str
    steps: int
    plans: int
    ratio: float


def main(argv: Sequence[str]) -> int:
    """Run the cases, and return 1 if one misses its goal."""
    args = parse(_parser(), argv, only=NAMES)
    load()  # compiled here, not while a run is timed
    chosen = args.only or NAMES
    adapted = [_lasting(name, args) for name in NAMES[:2] if name in chosen]
    steady = [_steady(name, args) for name in NAMES[2:] if name in chosen]
    if adapted:
        show(table_of(map(_adapted_cells, adapted), f"a rank at {SPEED:.0%}, a link at a third of its rate"))
    if steady:
        show(table_of(map(_steady_cells, steady), "no lasting change: no other schedule"))
    held = {"quiet": lambda case: not case.plans, "alternating": lambda case: case.ratio <= MOST_SLOWER}
    met = all(case.won >= GOAL for case in adapted) and all(held[case.name](case) for case in steady)
    return finish(args, "adapt", [*adapted, *steady], met=met)


def _lasting(name: str, args: argparse.Namespace) -> Adapted:
    """Run a case on emulated sites whose rank or link becomes slow and stays so."""
    each = args.layer / 1e3
    work = EmulatedWork(
        forward_s=each, input_s=each, weight_s=each, hidden_bytes=int(2 * each * args.rate * 1e6 / 8 / 4) * 4
    )
    layout = Layout(name, placement="site_fold", schedule="auto", zero=0, sites=SITES)
    topology = wan_topology(SITES, args.rate, args.latency)
    case = layout.case(measured_links(topology, work), 0, work)
    with NetBed.up(topology) as bed, tempfile.TemporaryDirectory(prefix="weft-adapt-") as folder:
        config = _config(layout, folder, work, args, ADAPT_STEPS)
        signal = Path(folder, "slow")
        slow_link = partial(_slow_link, bed, signal)
        ranks = run_ranks_in(
            bed, bed.nodes, adapt, case, config, name, str(signal), timeout_s=args.timeout, meanwhile=slow_link
        )
    return _adapted(name, ranks)


def _slow_link(bed: NetBed, signal: Path) -> None:
    """Slow the link between the sites down once the ranks have written ``signal``."""
    if signal.exists():
        signal.unlink()
        bed.slow("s0", "s1", by=LINK_SHARE)


def _adapted(name: str, ranks: Sequence[RankRun]) -> Adapted:
    run = max(ranks, key=lambda rank: sum(rank.step_s))
    plans = [plan for plan in run.plans if plan[1] == "schedule" and plan[0] > run.disturbed_at]
    if not plans:
        raise RuntimeError(f"{name}: no other schedule was planned in {len(run.step_s)} steps: {run.plans}")
    changed_at, _, none_s, schedule_s = plans[0]
    after = run.step_s[changed_at + 1 :]  # the first step with the new schedule has cold caches
    print(f"{name}: {[round(s, 3) for s in run.step_s]}; {run.plans}", file=sys.stderr)
    return Adapted(
        name=name,
        before_s=median(run.step_s[2 : run.disturbed_at]),
        without_s=median(run.step_s[run.disturbed_at + 1 : changed_at]),
        with_s=median(after),
        paper=1.0 - schedule_s / none_s,
    )


def adapt(case: EngineCase, config: WeftConfig, name: str, signal: str) -> RankRun:
    """Train until the schedule has changed, and some steps more. A collective call."""
    engine = emulated_engine(case, config)
    disturbed_at = 2 * ADAPT_STEPS
    last = _MOST_STEPS

    def disturb(step: int) -> None:
        if step == disturbed_at and name == "rank" and engine.global_rank == SLOW_RANK:
            _set_speed(engine, case.work, SPEED)
        if step == disturbed_at and name == "link" and engine.global_rank == 0:
            Path(signal).touch()

    try:
        seconds: list[float] = []
        while len(seconds) < last:
            seconds.append(_timed(engine, disturb, len(seconds)))
            if plans := [step for step, chosen, *_ in _plans(engine) if chosen == "schedule" and step > disturbed_at]:
                last = min(_MOST_STEPS, plans[0] + _AFTER)
        return RankRun(step_s=tuple(seconds), disturbed_at=disturbed_at, plans=_plans(engine))
    finally:
        engine.destroy()


def _steady(name: str, args: argparse.Namespace) -> Steady:
    """Run a case on one host with and without adaptation."""
    work = EmulatedWork(forward_s=args.short / 1e3, input_s=args.short / 1e3, weight_s=args.short / 1e3)
    layout = Layout(name, schedule="auto", zero=0)
    case = layout.case(Links(), 0, work)
    found: dict[bool, list[RankRun]] = {}
    for adapts in (False, True):
        steps = args.alternating if name == "alternating" else args.steps if adapts else max(3, args.steps // 10)
        with tempfile.TemporaryDirectory(prefix="weft-adapt-") as folder:
            config = _config(layout, folder, work, args, USUAL_STEPS)
            config.pipeline.adapt = adapts
            found[adapts] = run_ranks(layout.ranks, hold, case, config, name, steps, timeout_s=args.timeout)
    usual, own = (max(median(rank.step_s) for rank in found[adapts]) for adapts in (False, True))
    return Steady(name=name, steps=len(found[True][0].step_s), plans=len(found[True][0].plans), ratio=own / usual)


def hold(case: EngineCase, config: WeftConfig, name: str, steps: int) -> RankRun:
    """Train, on an alternating rank or undisturbed ones. A collective call."""
    engine = emulated_engine(case, config)

    def disturb(step: int) -> None:
        if name == "alternating" and engine.global_rank == 0 and step >= 2 * USUAL_STEPS:
            _set_speed(engine, case.work, SPEED if step // PERIOD % 2 else 1.0)

    try:
        seconds = [_timed(engine, disturb, step) for step in range(steps)]
        return RankRun(step_s=tuple(seconds[2:]), disturbed_at=0, plans=_plans(engine))
    finally:
        engine.destroy()


def _timed(engine: WeftEngine, disturb: Callable[[int], None], step: int) -> float:
    disturb(step)
    start = perf_counter()
    engine.train_batch()
    return perf_counter() - start


def _set_speed(engine: WeftEngine, work: EmulatedWork, speed: float) -> None:
    """Make this rank's layers take their time divided by ``speed`` from now on."""
    slower = {name: getattr(work, name) / speed for name in ("forward_s", "input_s", "weight_s")}
    for stage in engine.module.stages.values():
        for layer in stage.layers:
            layer.work = replace(work, **slower)


def _plans(engine: WeftEngine) -> tuple[tuple[int, str, float, float], ...]:
    if engine.adaptation is None:
        return ()
    return tuple(
        (step, found.chosen, found.levels[0].step_s, found.levels[1].step_s)
        for step, found in engine.adaptation.proposals
    )


def _config(
    layout: Layout, cache_dir: str, work: EmulatedWork, args: argparse.Namespace, adapt_steps: int
) -> WeftConfig:
    config = layout.config(cache_dir, timeout_s=args.timeout)
    config.pipeline.adapt, config.pipeline.adapt_steps = True, adapt_steps
    config.pipeline.search_seconds = args.search
    config.pipeline.memory_cap_bytes = _CHUNKS.get(layout.name, 8) * work.hidden_bytes
    return config


def _adapted_cells(case: Adapted) -> dict[str, Any]:
    return {
        "case": case.name,
        "before s": f"{case.before_s:.3f}",
        "during, without s": f"{case.without_s:.3f}",
        "during, with s": f"{case.with_s:.3f}",
        "measured gain": f"{case.gain:.1%}",
        "gain on paper": f"{case.paper:.1%}",
        "won": f"{case.won:.0%}",
    }


def _steady_cells(case: Steady) -> dict[str, Any]:
    return {
        "case": case.name,
        "steps": case.steps,
        "plans": case.plans,
        "median step over that without adaptation": f"{case.ratio:.3f}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks adapt", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--layer", type=float, default=20.0, help="a layer's forward in ms, and each of its gradients")
    parser.add_argument("--short", type=float, default=5.0, help="the same without a lasting change")
    parser.add_argument("--steps", type=int, default=500, help="undisturbed steps")
    parser.add_argument("--alternating", type=int, default=200, help="steps with an alternating rank")
    parser.add_argument("--latency", type=float, default=20.0, help="one-way delay between sites in ms")
    parser.add_argument("--rate", type=float, default=50.0, help="uplink of a node in Mbit/s")
    parser.add_argument("--search", type=float, default=1.0, help="pipeline.search_seconds")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case is given up")
    return parser
