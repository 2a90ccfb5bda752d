"""Undisturbed ranks, and one that alternates between fast and slow: schedules that must stay."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch.distributed as dist

from benchmarks.adapting.disturbance import SLOW_RANK, SPEED, adaptive_config, real_time, timed_step
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout, Links
from benchmarks.peers.weft_engine import emulated_engine, set_speed
from weft.conf.schema import WeftConfig
from weft.tools.ranks import run_ranks

NAMES = ("quiet", "alternating")
ADAPT_STEPS = 30  # the default
PERIOD = 20
"""Steps after which an alternating rank changes its speed."""
MOST_SLOWER = 1.02
_FIRST_SLOW = 2 * ADAPT_STEPS
_MICROBATCHES, _CHUNKS = 6, 2
"""Under this cap, half of 1F1B's, the simulator finds a schedule that is 7 % faster while the rank is slow."""


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The seconds of a rank's steps; and the plans: steps before each, and the chosen level."""

    step_s: tuple[float, ...]
    plans: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Steady:
    """A case without a lasting disturbance.

    Attributes:
        ratios: the step over that of a run without adaptation just before it.
    """

    name: str
    steps: int
    plans: tuple[int, ...]
    changes: tuple[int, ...]
    ratios: tuple[float, ...]

    @property
    def is_met(self) -> bool:
        """True if the case meets its goals."""
        if self.name == "quiet":
            return not any(self.plans)
        return max(self.changes) <= 1 and median(self.ratios) <= MOST_SLOWER


def run_steady(name: str, args: argparse.Namespace) -> Steady:
    """Run a case on one host, by turns without and with adaptation."""
    each = args.short / 1e3
    work = EmulatedWork(forward_s=each, input_s=each, weight_s=each)
    layout = Layout(name, schedule="auto", zero=0, microbatches=_MICROBATCHES)
    case = layout.case(Links(), 0, work)
    steps = (args.alternating, args.alternating) if name == "alternating" else (args.steps // 5, args.steps)
    rounds = args.rounds if name == "alternating" else 1
    with tempfile.TemporaryDirectory(prefix="weft-adapt-") as folder:
        cap_bytes = _CHUNKS * work.hidden_bytes
        config = adaptive_config(layout, folder, args, cap_bytes=cap_bytes, adapt_steps=ADAPT_STEPS)
        ranks = run_ranks(layout.ranks, train, case, config, name, steps, rounds, timeout_s=args.timeout)
    usual, own = ([[rank[adapts][at] for rank in ranks] for at in range(rounds)] for adapts in (False, True))
    return Steady(
        name=name,
        steps=steps[True],
        plans=tuple(len(run[0].plans) for run in own),
        changes=tuple(sum(level == "schedule" for _, level in run[0].plans) for run in own),
        ratios=tuple(_step_s(name, new) / _step_s(name, old) for new, old in zip(own, usual, strict=True)),
    )


def _step_s(name: str, ranks: Sequence[RankRun]) -> float:
    """Return the median step of the slowest rank, or the mean of those of its fast and its slow steps."""
    first = _FIRST_SLOW if name == "alternating" else 2
    phases = {_is_slow(name, step) for step in range(first, len(ranks[0].step_s))}
    return max(
        mean(
            median(s for step, s in enumerate(rank.step_s) if step >= first and _is_slow(name, step) == slow)
            for slow in phases
        )
        for rank in ranks
    )


def _is_slow(name: str, step: int) -> bool:
    return name == "alternating" and step >= _FIRST_SLOW and bool(step // PERIOD % 2)


def train(
    case: EngineCase, config: WeftConfig, name: str, steps: tuple[int, int], rounds: int
) -> tuple[list[RankRun], list[RankRun]]:
    """Train by turns without and with adaptation, with their numbers of ``steps``. A collective call."""
    runs: tuple[list[RankRun], list[RankRun]] = [], []
    for adapts in (False, True) * rounds:
        config.pipeline.adapt = adapts
        with real_time():
            runs[adapts].append(_run(case, config, name, steps[adapts]))
        dist.barrier()
    return runs


def _run(case: EngineCase, config: WeftConfig, name: str, steps: int) -> RankRun:
    engine = emulated_engine(case, config)
    try:
        step_s = []
        for step in range(steps):
            if engine.global_rank == SLOW_RANK and step % PERIOD == 0:
                set_speed(engine, case.work, SPEED if _is_slow(name, step) else 1.0)
            step_s.append(timed_step(engine))
        plans = () if engine.adaptation is None else engine.adaptation.proposals
        return RankRun(step_s=tuple(step_s), plans=tuple((step, found.chosen) for step, found in plans))
    finally:
        engine.destroy()
