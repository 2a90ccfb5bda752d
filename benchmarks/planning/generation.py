"""How long `auto` takes as ranks and micro-batches grow."""

from __future__ import annotations

import argparse
import time
from math import log

from benchmarks.results import show
from weft.pipeline.costs import CostModel, LinkCost
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_greedy import ListScheduler
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.auto_rules import backward_first
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.tools.tables import table_of

SIZES = ((4, 8), (8, 16), (8, 64), (16, 32), (16, 128), (32, 64), (32, 256), (64, 128), (64, 512))
"""Ranks and micro-batches; a fold, so two chunks per rank."""


def measure(_: argparse.Namespace) -> tuple[object, bool]:
    """Print the table; time per action should only grow with the logarithm of the event heap."""
    title = "auto on two folded sites, F = I = W = 1, WAN transfer 0.2 + latency 1"
    table = table_of((_row(*size) for size in SIZES), title, left=0)
    show(table, "log2: of the ranks, whose events share a heap. gap: step over a bound that ignores memory.")
    return table, True


def _row(num_ranks: int, num_microbatches: int) -> dict[str, object]:
    placement = Placement.fold(num_ranks, sites=(num_ranks // 2, num_ranks // 2))
    costs = CostModel.unit(2 * num_ranks, wan=LinkCost(latency_s=1.0, bandwidth_bps=40.0))
    started_s = time.perf_counter()
    problem = Problem(placement, num_microbatches, costs)
    ListScheduler(problem, backward_first(problem), 2.0 * num_ranks).run()
    pass_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    schedule = generate_auto(placement, num_microbatches, costs, 2.5 * num_ranks, 0.0)
    auto_s = time.perf_counter() - started_s
    actions = 3 * placement.num_stages * num_microbatches
    gap = simulate(schedule, costs).step_s / lower_bound_s(problem) - 1
    each_us = pass_s / actions * 1e6
    return {
        "ranks": num_ranks,
        "micro-batches": num_microbatches,
        "actions": actions,
        "one pass s": f"{pass_s:.2f}",
        "us/action": f"{each_us:.1f}",
        "us/action/log2": f"{each_us / log(num_ranks, 2):.2f}",
        "auto s": f"{auto_s:.1f}",
        "gap": f"{gap:.1%}",
    }
