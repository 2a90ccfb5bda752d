"""Ranks whose durations vary: schedules planned with medians and against sampled durations, by turns."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, mean, stdev

from benchmarks.adapting.disturbance import adaptive_config, real_time, set_jitter, timed_step
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout, Links
from benchmarks.peers.weft_engine import emulated_engine
from weft.conf.schema import WeftConfig
from weft.engine.distributed import from_rank_zero
from weft.engine.engine import WeftEngine
from weft.engine.planning.schedules import plan_schedule
from weft.pipeline.profile import fit_costs
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import sampled_steps_s
from weft.tools.ranks import run_ranks

CASES = {"uneven": (0.0, 0.0, 0.7, 0.0), "even": (0.4, 0.4, 0.4, 0.4), "calm": (0.0, 0.0, 0.0, 0.0)}
"""Jitter of each rank: the standard deviation of the logarithms of its layers' durations."""
_MICROBATCHES, _SAMPLES = 12, 16
_PROFILED_STEPS, _TURN_STEPS = 8, 6
_SIMULATED = range(-200, 0)  # planning samples numbers from 0
_NOISE = 2.0
"""Standard errors by which the mean gain may be below zero."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Schedules by medians and against samples, the simulated mean step of each, and the jitter of the stages."""

    schedules: tuple[Schedule, Schedule]
    simulated_s: tuple[float, float]
    jitter: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Jittery:
    """A case whose ranks have jitter.

    Attributes:
        jitter: measured jitter of each stage.
        medians_s, samples_s: mean step of each turn, by the schedule's plan. Turns draw the same numbers in pairs.
        simulated: simulated share of the mean step that the plan against samples saves.
    """

    name: str
    jitter: tuple[float, ...]
    medians_s: tuple[float, ...]
    samples_s: tuple[float, ...]
    simulated: float

    @property
    def gains(self) -> tuple[float, ...]:
        """Measured share of the step that the plan against samples saves, in each pair of turns."""
        return tuple(1.0 - new / old for new, old in zip(self.samples_s, self.medians_s, strict=True))

    @property
    def is_met(self) -> bool:
        """True if the plan against samples is not slower beyond noise, and faster where jitter is uneven."""
        error = stdev(self.gains) / len(self.gains) ** 0.5
        least = _NOISE * error if self.name == "uneven" else -_NOISE * error - 0.002
        return mean(self.gains) >= least


def run_jittery(name: str, args: argparse.Namespace) -> Jittery:
    """Run a case of four ranks on one host."""
    each = args.short / 1e3
    work = EmulatedWork(forward_s=each, input_s=each, weight_s=each)
    layout = Layout(name, schedule="auto", zero=0, microbatches=_MICROBATCHES)
    case = layout.case(Links(), 0, work)
    with tempfile.TemporaryDirectory(prefix="weft-adapt-") as folder:
        config = adaptive_config(layout, folder, args, cap_bytes=0, adapt_steps=1)
        config.pipeline.adapt = False
        ranks = run_ranks(layout.ranks, train, case, config, CASES[name], args.rounds, timeout_s=args.timeout)
    turns_s = [
        [max(step) for step in zip(*turn, strict=True)] for turn in zip(*(rank[1] for rank in ranks), strict=True)
    ]
    means_s = tuple(map(fmean, turns_s))
    found = ranks[0][0]
    return Jittery(
        name=name,
        jitter=found.jitter,
        medians_s=means_s[::2],
        samples_s=means_s[1::2],
        simulated=1.0 - found.simulated_s[1] / found.simulated_s[0],
    )


def train(
    case: EngineCase, config: WeftConfig, jitter: Sequence[float], rounds: int
) -> tuple[Planned, list[tuple[float, ...]]]:
    """Profile some steps, plan, and run both schedules by turns. Return the plan and each turn's steps. Collective."""
    with real_time():
        engine = emulated_engine(case, config)
        try:
            own = jitter[engine.pipe_rank]
            set_jitter(engine, own, 0)
            for _ in range(_PROFILED_STEPS):
                engine.train_batch()
            planned = _planned(engine, config)
            turns = []
            for seed in range(1, rounds + 1):
                for schedule in planned.schedules:
                    engine.run_schedules({1: schedule})
                    timed_step(engine)
                    set_jitter(engine, own, seed)
                    turns.append(tuple(timed_step(engine) for _ in range(_TURN_STEPS)))
            return planned, turns
        finally:
            engine.destroy()


def _planned(engine: WeftEngine, config: WeftConfig) -> Planned:
    """Return the schedules from the measured costs. Collective."""
    timelines = engine.measured_timelines()[1:]

    def plan() -> Planned:
        costs = fit_costs(timelines, engine.plan.costs)
        schedules = [
            plan_schedule(
                replace(config.pipeline, jitter_samples=samples),
                engine.plan.placement,
                costs=costs,
                zero_stage=config.zero.stage,
            )
            for samples in (0, _SAMPLES)
        ]
        simulated_s = [fmean(sampled_steps_s(schedule, costs, _SIMULATED)) for schedule in schedules]
        return Planned(
            schedules=(schedules[0], schedules[1]),
            simulated_s=(simulated_s[0], simulated_s[1]),
            jitter=tuple(stage.jitter for stage in costs.stages),
        )

    return from_rank_zero(plan, Planned, Schedule)
