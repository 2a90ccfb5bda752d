"""`weft simulate SCHEDULE --prefill TRACE`: prompts in the bubbles of many DP-cells, on paper."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from weft.inference.bubble_pattern import BubblePattern
from weft.inference.prompt_work import PromptWork
from weft.inference.replay import Arrival, Replay, read_trace, replay, sped_up
from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.costs import CostModel
from weft.pipeline.lowering import lower
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.timeline import Timeline

COLUMNS = (
    *("offered", "trace x", "prompts", "refused", "begins after ms: p50", "p99", "queued ms: p50", "p99", "most"),
    *("TTFT s: p50", "p99", "GPUs busy", "usable filled", "place us: p99"),
)
STEPS, WARM_STEPS = 24, 4
"""Training steps that a load is held for, and those of them before bubbles are watched."""


def report(schedule: Schedule, costs: CostModel, args: argparse.Namespace) -> None:
    """Print waiting, TTFT and utilisation for the trace as it is, and sped up to shares of the room.

    Raises:
        ValueError: the GPUs do not come out as whole DP-cells, or the trace cannot be read.
    """
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
    work, guard_s = args.prefill_cost, args.guard / 1e3
    cell = [
        BubblePattern(timeline.bubbles(rank), timeline.step_s, overhead_s=work.overhead_s, guard_s=guard_s)
        for rank in range(timeline.num_ranks)
    ]
    console = Console(width=130)
    usable = _shares(console, timeline, cell, args)
    table = Table(title=f"{len(trace)} prompts of {args.prefill.name}, deadline {args.deadline:g} s")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    room = sum(pattern.capacity_s / pattern.period_s for pattern in cell) * args.cells
    offered = sum(work.work_s(arrival.tokens) for arrival in trace) / trace[-1].at_s
    for load in (None, *args.loads):
        factor = 1.0 if load is None else load * room / offered
        seconds = trace[-1].at_s if load is None else STEPS * timeline.step_s
        found = _run(cell * args.cells, trace, factor, seconds, args, work, timeline.step_s)
        table.add_row(f"{factor * offered / room:.1%}", *_cells(found, factor, timeline, usable))
    console.print(table)


def _run(
    patterns: Sequence[BubblePattern],
    trace: Sequence[Arrival],
    factor: float,
    seconds: float,
    args: argparse.Namespace,
    work: PromptWork,
    step_s: float,
) -> Replay:
    arrivals = sped_up(trace, factor, seconds)
    return replay(patterns, arrivals, work, seconds=seconds, warm_s=WARM_STEPS * step_s, deadline_s=args.deadline)


def _shares(console: Console, timeline: Timeline, cell: Sequence[BubblePattern], args: argparse.Namespace) -> float:
    """Print where the ranks' time goes; returns the share that prefills can use."""
    whole_s = timeline.step_s * timeline.num_ranks
    usable = sum(pattern.open_s for pattern in cell) / whole_s
    console.print(
        f"{args.gpus} GPUs in {args.cells} DP-cells of {timeline.num_ranks}; step {timeline.step_s:.3f} s: "
        f"training {1 - timeline.bubble_share:.1%}, bubbles {timeline.bubble_share:.1%}, of which prefills can use "
        f"{usable:.1%} (less {args.guard:g} ms at the end of each, and bubbles too short for a step)"
    )
    return usable


def _cells(found: Replay, factor: float, timeline: Timeline, usable: float) -> tuple[str, ...]:
    count = len(found.ttfts_s) + found.refused
    begins_ms = np.quantile(found.waits_s, (0.5, 0.99)) * 1e3
    queued_ms = np.quantile(found.queued_s, (0.5, 0.99, 1.0)) * 1e3
    return (
        f"{factor:.3g}",
        f"{count}",
        f"{found.refused / count:.1%}",
        *(f"{value:.1f}" for value in (*begins_ms, *queued_ms)),
        *(f"{value:.2f}" for value in np.quantile(found.ttfts_s, (0.5, 0.99))),
        f"{1 - timeline.bubble_share + found.prefill_share:.1%}",
        f"{found.prefill_share / usable:.1%}",
        f"{np.quantile(found.places_us, 0.99):.0f}",
    )
