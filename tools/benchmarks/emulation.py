"""Emulation: an emulated step beside the real one, by turns."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median

from weft.conf.schema import CommConfig, PipelineConfig, PlacementKind, ScheduleKind, WeftConfig
from weft.engine.emulation.stage import EmulatedWork
from weft.pipeline.costs import LinkCost
from weft.tools.benchmarks.peers.case import EngineCase
from weft.tools.benchmarks.peers.emulated_job import LayersJob
from weft.tools.benchmarks.peers.link import Way, measure_link
from weft.tools.benchmarks.peers.stepping import time_steps
from weft.tools.benchmarks.peers.weft_engine import emulated_engine
from weft.tools.benchmarks.results import parse, write_json
from weft.tools.emulation.session import Setting
from weft.tools.emulation.turns import emulate
from weft.tools.emulation.what_if import WhatIf
from weft.tools.ranks import run_ranks
from weft.tools.tables import show, table_of

WORK = EmulatedWork(forward_s=0.03, input_s=0.03, weight_s=0.03, hidden_bytes=2**18, weight_elements=2**14)
"""Of a layer. The host takes about 0.3 ms of a slot, more where many ranks share its processors: of slots of 20 ms
that alone would be more than the goal."""
TIMEOUT_S = 280.0
GOAL, MOST = 0.005, 0.015
"""Error of the median that most jobs keep to, and that all do.

Each is besides the real job's own difference between runs. Where real runs differ by more than the second, the machine
was too busy to tell, and nothing is shown.
"""


@dataclass(frozen=True)
class Layout:
    """One job that can be run for real here."""

    name: str
    stages: int = 4
    replicas: int = 1
    schedule: str = "1f1b"
    placement: str = "straight"
    zero: int = 1
    layers: tuple[int, ...] = ()
    slow: tuple[int, float] | None = None

    def case(self, steps: int) -> EngineCase:
        """Its layers."""
        return EngineCase(
            num_ranks=self.stages,
            num_layers=8,
            num_replicas=self.replicas,
            work=WORK,
            in_a_row=True,
            num_warmup=3,
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
        )
        config = WeftConfig(pipeline=pipeline, comm=CommConfig(timeout_s=TIMEOUT_S))
        config.zero.stage = self.zero
        config.data.cache_dir = cache
        return config


LAYOUTS = (
    Layout("straight"),
    Layout("w, fold", schedule="w", placement="fold"),
    Layout("two stages", stages=2),
    Layout("eight stages", stages=8),
    Layout("uneven layers", layers=(3, 1, 3, 1)),
    Layout("auto", schedule="auto", placement="fold"),
    Layout("interleaved", schedule="interleaved", placement="interleaved"),
    Layout("2 replicas, ZeRO-0", stages=2, replicas=2, zero=0),
    Layout("2 replicas, ZeRO-2", stages=2, replicas=2, zero=2),
    Layout("4 replicas, ZeRO-3", stages=2, replicas=4, zero=3),
    Layout("4 x 4", stages=4, replicas=4),
    Layout("straggler", slow=(2, 0.8)),
)


@dataclass(frozen=True)
class Beside:
    """One job, both ways.

    Attributes:
        real_s, emulated_s: seconds of a step: of each run, the median.
    """

    name: str
    ranks: int
    real_s: list[float]
    emulated_s: list[float]

    @property
    def own(self) -> float:
        """By how much real runs differ from their median, at most."""
        return max(abs(s / median(self.real_s) - 1) for s in self.real_s)

    @property
    def error(self) -> float:
        """By how much the emulated step differs from the real one."""
        return median(self.emulated_s) / median(self.real_s) - 1


def main(argv: Sequence[str]) -> int:
    """Run ``[--jobs NAME ...] [--rounds N] [--steps N]``; returns 1 if an error is larger than the goal, or not shown.

    Each job runs for real and emulated by turns, in steps that follow each other.

    Raises:
        ValueError: there is no such job.
    """
    parser = argparse.ArgumentParser(prog="weft bench emulation", description=__doc__)
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--jobs", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default all")
    parser.add_argument("--rounds", type=int, default=2, help="real and emulated runs of each")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    args = parse(parser, argv, jobs=names)
    link = measure_link(WORK.hidden_bytes, Way.shared)
    found = []
    with tempfile.TemporaryDirectory(prefix="weft-emulation-") as cache:
        for layout in LAYOUTS:
            if not args.jobs or layout.name in args.jobs:
                found.append(compare(layout, link, args.rounds, args.steps, cache))
                print(", ".join(f"{name} {value}" for name, value in _row(found[-1]).items()), flush=True)
    show(table_of(map(_row, found), "A step emulated and real"))
    met = all(_within(beside, MOST) for beside in found)
    met = met and 4 * sum(_within(beside, GOAL) for beside in found) >= 3 * len(found)
    write_json(args, "emulation", [asdict(beside) for beside in found], met=met)
    return 0 if met else 1


def compare(layout: Layout, link: LinkCost, rounds: int, steps: int, cache: str) -> Beside:
    """One job for real and emulated, by turns."""
    case = replace(layout.case(steps), link=link)
    size = layout.stages * layout.replicas
    what_if = WhatIf(slow=dict([layout.slow]) if layout.slow else {})
    setting = Setting(delays="simulate", per_host=size, inside=link, between=link, what_if=what_if)
    config, beside = layout.config(cache), Beside(layout.name, size, [], [])
    for _ in range(rounds):
        measured = run_ranks(size, partial(real_steps, case, config, layout.slow), timeout_s=TIMEOUT_S)
        beside.real_s.append(median(map(median, measured)))
        beside.emulated_s.append(emulate(LayersJob(case, config), size, setting, steps=steps).step_s)
    return beside


def real_steps(case: EngineCase, config: WeftConfig, slow: tuple[int, float] | None) -> tuple[float, ...]:
    """Seconds of the measured steps on one rank of the real job."""
    if slow is not None and int(os.environ["RANK"]) == slow[0]:
        work = case.work
        times = {name: getattr(work, name) / slow[1] for name in ("forward_s", "input_s", "weight_s")}
        engine = emulated_engine(case, config, work=replace(work, **times))
    else:
        engine = emulated_engine(case, config)
    seconds = time_steps(case, engine.train_batch)
    engine.destroy()
    return seconds


def _row(beside: Beside) -> dict[str, object]:
    return {
        "job": beside.name,
        "ranks": beside.ranks,
        "real": f"{1e3 * median(beside.real_s):.1f} ms",
        "runs differ": f"{beside.own:.2%}",
        "emulated": f"{1e3 * median(beside.emulated_s):.1f} ms",
        "error": f"{beside.error:+.2%}",
        f"within {GOAL:.1%}": _verdict(beside, GOAL),
        f"within {MOST:.1%}": _verdict(beside, MOST),
    }


def _verdict(beside: Beside, goal: float) -> str:
    if beside.own > MOST:
        return f"not shown: real runs differ by {beside.own:.1%}"
    return "yes" if _within(beside, goal) else "no"


def _within(beside: Beside, goal: float) -> bool:
    """Whether the error is no larger than the goal, on a machine that could tell."""
    return beside.own <= MOST and abs(beside.error) <= goal + beside.own
