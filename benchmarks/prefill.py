"""The time that it takes to choose a bubble and a worker for a prompt."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from time import perf_counter_ns, thread_time_ns

from benchmarks.results import finish, parse, show
from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.chain_pattern import chain_pattern
from weft.inference.placement.prefill_placement import PrefillPlacement
from weft.inference.placement.prompt_work import PromptWork
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.tools.tables import table_of

RANKS = (12, 1_000, 10_000)
LOADS = (0.3, 0.9, 1.2)
CHAINS = (1, 8)
"""Ranks of a worker. Only a fleet of a thousand has more than one."""
HOP_S = 2.3e-3
"""Time between stages: the paper's 16 ms over seven hops (section 6.6)."""
STAGES, PIPELINES = 4, 5
COST = PromptWork(step_s=5e-3, token_s=107e-6, context_s=3.5e-9)
"""A model of 8 B parameters at 150 TFLOP/s; see docs/benchmarks.md."""


def main(argv: Sequence[str]) -> int:
    """Print the time per prompt by fleet, load and patterns, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prefill", description=__doc__)
    parser.add_argument("--requests", type=int, default=5_000, help="prompts placed in each row")
    args = parse(parser, argv)
    cases = [case for case in product(RANKS, CHAINS, (False, True), LOADS) if case[0] == 1_000 or case[1] == 1]
    rows = (_row(*case, args.requests) for case in cases)
    table = table_of(rows, "microseconds to find and take a bubble and a worker", left=0)
    show(table)
    return finish(args, "prefill", table)


def _row(num_ranks: int, chain: int, own: bool, load: float, num_requests: int) -> dict[str, object]:
    patterns = _fleet(num_ranks, chain, own=own)
    took_us, computed_us, waited = _place(patterns, load, num_requests, chain)
    cuts = statistics.quantiles(took_us, n=100)
    return {
        "ranks": num_ranks,
        "PP": chain,
        "patterns": len(set(patterns)),
        "load": f"{load:.0%}",
        "p50": f"{cuts[49]:.1f}",
        "p99": f"{cuts[98]:.1f}",
        "p99 computed": f"{statistics.quantiles(computed_us, n=100)[98]:.1f}",
        "most": f"{max(took_us):.0f}",
        "placed late": f"{waited:.1%}",
    }


def _fleet(num_ranks: int, chain: int, *, own: bool) -> list[BubblePattern]:
    """Return the bubbles of DP-cells over two sites, as planned, or with ``own`` as each rank might measure them.

    Args:
        chain: ranks of a worker: neighbours of one position in their pipelines.
    """
    stage = StageCost(forward_s=0.05, input_s=0.05, weight_s=0.05, activation_bytes=1, output_bytes=1)
    wan = LinkCost(latency_s=0.02, bandwidth_bps=8 / 0.05)
    placement = Placement.straight(STAGES, (STAGES // 2, STAGES // 2))
    costs = CostModel(stages=(stage,) * STAGES, wan=wan)
    timeline = simulate(lower(generate("1f1b", placement, 8, costs=costs)), costs)
    rng = random.Random(1)
    patterns, members = [], []
    for gpu in range(num_ranks) if chain == 1 else sorted(range(num_ranks), key=lambda gpu: gpu % STAGES):
        bubbles = [*timeline.bubbles(gpu % STAGES)]
        if own:
            bubbles = [(start + rng.uniform(0, 2e-3), end - rng.uniform(0, 2e-3)) for start, end in bubbles]
        origin_s = 0.05 * (gpu // STAGES % PIPELINES)
        if chain > 1:
            members.append(_turned(bubbles, origin_s, timeline.step_s))
            if len(members) == chain:
                overhead_s = COST.overhead_s / chain
                patterns.append(_chain(tuple(members), timeline.step_s, overhead_s))
                members = []
            continue
        patterns.append(
            BubblePattern(bubbles, timeline.step_s, origin_s=origin_s, overhead_s=COST.overhead_s, guard_s=2e-3)
        )
    return patterns


@cache
def _chain(bubbles: tuple[tuple[tuple[float, float], ...], ...], period_s: float, overhead_s: float) -> BubblePattern:
    return chain_pattern(bubbles, period_s, hop_s=HOP_S, overhead_s=overhead_s, guard_s=2e-3)


def _turned(bubbles: Sequence[tuple[float, float]], by_s: float, period_s: float) -> tuple[tuple[float, float], ...]:
    """Return the bubbles of a step that begins ``by_s`` later, in order from time 0."""
    found = []
    for start_s, end_s in ((start_s + by_s, end_s + by_s) for start_s, end_s in bubbles):
        found += [(start_s % period_s, min(period_s, start_s % period_s + end_s - start_s))]
        if start_s < period_s < end_s:
            found.append((0.0, end_s - period_s))
    return tuple(sorted(found))


def _place(
    patterns: Sequence[BubblePattern], load: float, num_requests: int, chain: int
) -> tuple[list[float], list[float], float]:
    """Return the microseconds of each placement, those of them on a processor, and the share of prompts that waited."""
    placement = PrefillPlacement(patterns[0].period_s)
    for worker, pattern in enumerate(patterns):
        placement.set(worker, pattern, 0.0)
    rate = load * sum(pattern.capacity_s / pattern.period_s for pattern in patterns)
    took_us, computed_us, waited = [], [], 0
    gc.collect()
    gc.disable()
    for now_s, work_s in _requests(rate, num_requests, chain):
        begun_ns, computed_ns = perf_counter_ns(), thread_time_ns()
        slot = placement.find(now_s, work_s)
        assert slot is not None
        placement.take(slot)
        computed_us.append((thread_time_ns() - computed_ns) / 1e3)
        took_us.append((perf_counter_ns() - begun_ns) / 1e3)
        waited += slot.begin_s > now_s
    gc.enable()
    return took_us, computed_us, waited / num_requests


def _requests(rate: float, num_requests: int, chain: int) -> Iterator[tuple[float, float]]:
    """Yield (arrival, work of a rank) in seconds; ``rate`` is the work in seconds per second."""
    rng = random.Random(2)
    works = [COST.work_s(min(max(int(rng.lognormvariate(7.1, 1.0)), 3), 8192)) / chain for _ in range(num_requests)]
    mean_s, now_s = statistics.mean(works), 0.0
    for work_s in works:
        now_s += rng.expovariate(rate / mean_s)
        yield now_s, work_s
