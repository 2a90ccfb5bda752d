"""`weft simulate SCHEDULE --prefill TRACE`: a simulation of prompts in the bubbles of many DP-cells."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.chain_pattern import chain_pattern
from weft.inference.placement.prompt_work import PromptWork
from weft.inference.placement.replay import (
    MAX_WINDOWS,
    Arrival,
    Replay,
    length_s,
    read_trace,
    replay,
    sped_up,
    steady_state,
)
from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.costs import CostModel
from weft.pipeline.lowering import lower
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.timeline import Timeline
from weft.tools.tables import show, table_of

MOST_LOAD = 100.0
MOST_PROMPTS = 1_000_000
"""Prompts in a window: a replay has up to 60 of them, and takes about 20 us for a prompt."""
SAMPLE = 8
"""One of so many prompts is also placed on an idle fleet, for its queueing."""
WINDOW_STEPS = 8
"""Training steps that a window has at least."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`, except for the trace."""
    prefill = parser.add_argument_group("prefills in the bubbles (with --prefill)")
    prefill.add_argument("--gpus", type=int, default=1000, help="number of GPUs that train; default 1000")
    prefill.add_argument("--cells", type=int, default=50, help="number of DP-cells that the GPUs form; default 50")
    prefill.add_argument(
        "--stages",
        type=int,
        nargs="*",
        default=[1],
        metavar="P",
        help="GPUs that the served model is cut over: neighbours of one position in their pipelines; default 1",
    )
    prefill.add_argument(
        "--hop", type=float, default=2.3, metavar="MS", help="time from a stage to the next one; default 2.3"
    )
    prefill.add_argument(
        "--weights",
        type=float,
        default=16.1,
        metavar="GB",
        help="weights of the served model, of which each stage has its part; default: Llama 3 8B in bf16",
    )
    prefill.add_argument(
        "--prefill-cost",
        type=_prefill_cost,
        default="5,107,3.5",
        metavar="STEP_MS,TOKEN_US,PAIR_NS",
        help="cost of a chunk: per engine step, per token, per pair of tokens; default: 8 B parameters on an A100",
    )
    prefill.add_argument(
        "--guard", type=float, default=2.0, metavar="MS", help="time kept free at the end of each bubble; default 2"
    )
    prefill.add_argument(
        "--deadline",
        type=float,
        default=10.0,
        metavar="S",
        help="longest acceptable time to the first token; default 10",
    )
    prefill.add_argument(
        "--loads",
        type=float,
        nargs="*",
        default=[0.5, 0.8, 0.95, 1.2],
        help="offered loads, as fractions of the bubbles' capacity",
    )


def _prefill_cost(text: str) -> PromptWork:
    """Parse the option's value: STEP_MS,TOKEN_US,PAIR_NS of a chunk of n tokens after c."""
    try:
        step_ms, token_us, pair_ns = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected STEP_MS,TOKEN_US,PAIR_NS, as in 5,107,3.5") from None
    return PromptWork(step_s=step_ms / 1e3, token_s=token_us / 1e6, context_s=pair_ns / 1e9, max_tokens=8192)


def report(schedule: Schedule, costs: CostModel, args: argparse.Namespace) -> None:
    """Print waiting, TTFT and utilisation for the trace as it is, and sped up to shares of the bubbles' capacity.

    Raises:
        ValueError: an option is out of range, the number of GPUs is no multiple of a DP-cell, no prompt fits into the
            bubbles, or the trace cannot be read.
    """
    _check(args)
    trace = read_trace(args.prefill)
    ranks = schedule.num_ranks
    pipelines, rest = divmod(args.gpus, args.cells * ranks)
    if pipelines < 1 or rest:
        raise ValueError(
            f"--gpus={args.gpus}: not a multiple of --cells={args.cells} x {ranks} pipeline ranks; "
            f"choose {max(pipelines, 1) * args.cells * ranks}"
        )
    shared = costs.for_cell(pipelines)
    timeline = simulate(add_relays(lower(side_by_side(schedule, pipelines)), shared), shared)
    rows, notes = [], []
    for stages in args.stages:
        fleet = _fleet(timeline, pipelines, stages, args)
        if stages == args.stages[0]:
            show(_shares(timeline, fleet, args))
        for factor in (1.0, *(load * fleet.room / fleet.offered(trace) for load in args.loads)):
            found = _run(fleet, trace, factor, args, timeline.step_s)
            if not found.steady:
                notes = [f"* still changing after {MAX_WINDOWS} windows"]
            share = f"{factor * fleet.offered(trace) / fleet.room:.1%}{'' if found.steady else '*'}"
            staged = {} if args.stages == [1] else {"PP": str(stages), "GB": f"{args.weights / stages:.1f}"}
            rows.append({**staged, "offered": share, **_cells(found, factor, timeline, fleet.usable)})
    title = f"{len(trace)} prompts of {args.prefill.name}, deadline {args.deadline:g} s"
    show(table_of(rows, title, left=0), *notes)


@dataclass(frozen=True)
class _Fleet:
    """The workers of all GPUs.

    Attributes:
        work: cost of a prompt in each stage.
        usable: share of the GPUs' time in which work can run.
    """

    patterns: Sequence[BubblePattern]
    work: PromptWork
    usable: float

    @property
    def room(self) -> float:
        """Seconds of work in each stage that fit into a second, over all workers."""
        return sum(pattern.capacity_s / pattern.period_s for pattern in self.patterns)

    def offered(self, trace: Sequence[Arrival]) -> float:
        """Return the seconds of work in each stage that the trace brings in a second."""
        return sum(self.work.work_s(arrival.tokens) for arrival in trace) / length_s(trace)


def _fleet(timeline: Timeline, pipelines: int, stages: int, args: argparse.Namespace) -> _Fleet:
    """Return workers of ``stages`` GPUs. Neighbours have the same position in their pipelines."""
    if stages < 1 or args.gpus % stages:
        raise ValueError(f"--stages={stages}: not a divisor of --gpus={args.gpus}; choose one")
    whole: PromptWork = args.prefill_cost
    work = replace(
        whole, step_s=whole.step_s / stages, token_s=whole.token_s / stages, context_s=whole.context_s / stages
    )
    ranks = timeline.num_ranks // pipelines
    order = [
        pipeline * ranks + rank for rank in range(ranks) for _ in range(args.cells) for pipeline in range(pipelines)
    ]
    known: dict[tuple[int, ...], BubblePattern] = {}
    patterns = []
    for first in range(0, len(order), stages):
        group = tuple(order[first : first + stages])
        if group not in known:
            known[group] = _pattern(timeline, group, work, args)
        patterns.append(known[group])
    if not any(pattern.capacity_s for pattern in patterns):
        raise ValueError(
            f"--guard={args.guard:g}, --prefill-cost: no bubble is long enough for an engine step; lower them"
        )
    usable = sum(pattern.open_s for pattern in patterns) / (timeline.step_s * len(patterns))
    return _Fleet(patterns, work, usable)


def _pattern(timeline: Timeline, group: Sequence[int], work: PromptWork, args: argparse.Namespace) -> BubblePattern:
    bubbles, guard_s = [timeline.bubbles(rank) for rank in group], args.guard / 1e3
    if len(group) == 1:
        return BubblePattern(bubbles[0], timeline.step_s, overhead_s=work.overhead_s, guard_s=guard_s)
    return chain_pattern(bubbles, timeline.step_s, hop_s=args.hop / 1e3, overhead_s=work.overhead_s, guard_s=guard_s)


def _check(args: argparse.Namespace) -> None:
    """Refuse options that have no meaning, or with which the simulation would not end."""
    for name in ("gpus", "cells"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name}={value}: give a whole number above 0")
    if not 0.0 < args.deadline < inf:
        raise ValueError(f"--deadline={args.deadline:g}: give a number of seconds above 0")
    if not 0.0 <= args.guard < inf:
        raise ValueError(f"--guard={args.guard:g}: give a number of milliseconds, 0 or more")
    for load in args.loads:
        if not 0.0 < load <= MOST_LOAD:
            raise ValueError(f"--loads={load:g}: give shares of the room above 0 and at most {MOST_LOAD:g}")
    if not 0.0 <= args.hop < inf:
        raise ValueError(f"--hop={args.hop:g}: give a number of milliseconds, 0 or more")
    if not 0.0 <= args.weights < inf:
        raise ValueError(f"--weights={args.weights:g}: give a number of gigabytes, 0 or more")
    cost = args.prefill_cost
    if not all(0.0 <= part < inf for part in (cost.step_s, cost.token_s, cost.context_s)) or not cost.token_s:
        raise ValueError("--prefill-cost: give times of 0 or more, and above 0 for a token")


def _run(fleet: _Fleet, trace: Sequence[Arrival], factor: float, args: argparse.Namespace, step_s: float) -> Replay:
    """Return the steady state. Windows are whole repetitions of the trace, so that they are comparable."""
    round_s = length_s(trace) / factor
    window_s = round_s * ceil(max(WINDOW_STEPS * step_s, args.deadline) / round_s)
    if (prompts := len(trace) * window_s / round_s) > MOST_PROMPTS:
        raise ValueError(
            f"--prefill={args.prefill}: {prompts:.3g} prompts in {window_s:.3g} s, and at most {MOST_PROMPTS:,} are "
            "replayed; correct TIMESTAMP, or lower --deadline"
        )
    arrivals = sped_up(trace, factor)
    windows = replay(fleet.patterns, arrivals, fleet.work, window_s=window_s, deadline_s=args.deadline, sample=SAMPLE)
    return steady_state(windows, deadline_s=args.deadline)


def _shares(timeline: Timeline, fleet: _Fleet, args: argparse.Namespace) -> str:
    """Return a line about how the ranks spend their time."""
    return (
        f"{args.gpus} GPUs in {args.cells} DP-cells of {timeline.num_ranks}; step {timeline.step_s:.3f} s: "
        f"training {1 - timeline.bubble_share:.1%}, bubbles {timeline.bubble_share:.1%}, of which prefills can use "
        f"{fleet.usable:.1%} (less {args.guard:g} ms at the end of each, and bubbles too short for a step)"
    )


def _cells(found: Replay, factor: float, timeline: Timeline, usable: float) -> dict[str, str]:
    return {
        "trace x": f"{factor:.3g}",
        "prompts": f"{len(found.ttfts_s) + found.refused}",
        "refused": f"{found.refused_share:.1%}",
        "begins p50 ms": _quantile(found.waits_s, 0.5, 1e3, 1),
        "begins p99 ms": _quantile(found.waits_s, 0.99, 1e3, 1),
        "queued p50 ms": _quantile(found.queued_s, 0.5, 1e3, 1),
        "queued p99 ms": _quantile(found.queued_s, 0.99, 1e3, 1),
        "queued most ms": _quantile(found.queued_s, 1.0, 1e3, 1),
        "TTFT p50 s": _quantile(found.ttfts_s, 0.5, 1.0, 2),
        "TTFT p99 s": _quantile(found.ttfts_s, 0.99, 1.0, 2),
        "GPUs busy": f"{1 - timeline.bubble_share + found.prefill_share:.1%}",
        "usable filled": f"{found.prefill_share / usable:.1%}",
        "place p99 us": _quantile(found.places_us, 0.99, 1.0, 0),
    }


def _quantile(values: Sequence[float], share: float, unit: float, digits: int) -> str:
    """Return a quantile of the accepted prompts, or a dash if there are none."""
    return f"{np.quantile(values, share) * unit:.{digits}f}" if values else "-"
