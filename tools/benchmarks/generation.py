"""`weft bench generation`: how long `auto` takes as ranks and micro-batches grow."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from math import log

from rich.console import Console
from rich.table import Table

from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_greedy import ListScheduler
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.auto_rules import backward_first
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.tools.benchmarks.results import parse, write_json

SIZES = ((4, 8), (8, 16), (8, 64), (16, 32), (16, 128), (32, 64), (32, 256), (64, 128), (64, 512))
"""Ranks and micro-batches; a fold, so two chunks per rank."""


def main(argv: Sequence[str]) -> int:
    """Print the table and return 0; time per action should only grow with the logarithm of the event heap."""
    parser = argparse.ArgumentParser(prog="weft bench generation", description=__doc__)
    parser.add_argument("--search", type=float, default=0.0, metavar="SECONDS", help="for auto, per schedule")
    parser.add_argument("--quick", action="store_true", help="the smaller half")
    args = parse(parser, argv)
    table = Table(title="auto on two folded sites, F = I = W = 1, WAN transfer 0.2 + latency 1")
    for column in ("ranks", "micro-batches", "actions", "one pass s", "us/action", "us/action/log2", "auto s", "gap"):
        table.add_column(column, justify="right", no_wrap=True)
    for num_ranks, num_microbatches in SIZES[: len(SIZES) // 2 if args.quick else None]:
        table.add_row(*_measure(num_ranks, num_microbatches, args.search))
    console = Console(width=110)
    console.print(table)
    console.print("log2: of the ranks, whose events share a heap. gap: step over a bound that ignores memory.")
    write_json(args, "generation", table)
    return 0


def _measure(num_ranks: int, num_microbatches: int, search_s: float) -> tuple[str, ...]:
    placement = Placement.fold(num_ranks, sites=(num_ranks // 2, num_ranks // 2))
    costs = CostModel.unit(2 * num_ranks, wan=LinkCost(latency_s=1.0, bandwidth_bps=40.0))
    started_s = time.perf_counter()
    problem = Problem(placement, num_microbatches, costs)
    ListScheduler(problem, backward_first(problem), 2.0 * num_ranks).run()
    pass_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    schedule = generate_auto(placement, num_microbatches, costs, 2.5 * num_ranks, search_s)
    auto_s = time.perf_counter() - started_s
    actions = 3 * placement.num_stages * num_microbatches
    gap = simulate(schedule, costs).step_s / lower_bound_s(problem) - 1
    each_us = pass_s / actions * 1e6
    return (
        f"{num_ranks}",
        f"{num_microbatches}",
        f"{actions}",
        f"{pass_s:.2f}",
        f"{each_us:.1f}",
        f"{each_us / log(num_ranks, 2):.2f}",
        f"{auto_s:.1f}",
        f"{gap:.1%}",
    )
