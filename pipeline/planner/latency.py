"""The time of a pipeline's step: Atlas's ``get_latency_pp``, by list scheduling one DP-cell."""

from __future__ import annotations

from dataclasses import dataclass

from weft.pipeline.costs import CostModel
from weft.pipeline.generators.auto_greedy import ListScheduler
from weft.pipeline.generators.auto_problem import Problem, Rows
from weft.pipeline.generators.auto_rules import atlas, backward_first
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.generators.one_f_one_b import generate_1f1b
from weft.pipeline.placement import Placement

_ROUNDED_UP = 1 + 1e-9
"""Tolerance for rounding errors in sums of bytes."""


@dataclass(frozen=True)
class Latency:
    """Of one step's pipeline.

    Attributes:
        step_s: until the last rank has computed its last gradient.
        peak_bytes: activations that each rank holds at most.
    """

    step_s: float
    peak_bytes: tuple[float, ...]


def pipeline_latency(
    placement: Placement, num_microbatches: int, costs: CostModel, cap_bytes: float, schedule: str = "auto"
) -> Latency:
    """The step that a list scheduler finds for a DP-cell, or 1F1B takes; `auto` searches on from there.

    Long runs have a closed form: the first micro-batches are scheduled, and each further one takes
    what the last of these took on average.

    Args:
        costs: of one pipeline.
        cap_bytes: activations that a rank may hold.
        schedule: ``auto`` or ``1f1b``.
    """
    ranks = placement.single.num_ranks
    if num_microbatches <= first_microbatches(ranks):
        return _scheduled(placement, num_microbatches, costs, cap_bytes, schedule)
    # A pipeline with P micro-batches in flight repeats itself after P: periods are counted whole.
    shorter = first_microbatches(ranks) - 2 * ranks + (num_microbatches - first_microbatches(ranks)) % ranks
    first = _scheduled(placement, shorter, costs, cap_bytes, schedule)
    last = _scheduled(placement, shorter + ranks, costs, cap_bytes, schedule)
    periods = (num_microbatches - shorter - ranks) / ranks
    return Latency(last.step_s + periods * (last.step_s - first.step_s), last.peak_bytes)


def first_microbatches(num_ranks: int) -> int:
    """Micro-batches up to which a pipeline of so many ranks is scheduled as a whole."""
    return 4 * num_ranks + 8


def latency_bound_s(
    placement: Placement, num_microbatches: int, costs: CostModel, in_flight: list[float] | None = None
) -> float:
    """What no schedule of a DP-cell on a straight placement beats: `lower_bound_s` without a `Problem`.

    Args:
        costs: of one pipeline.
        in_flight: micro-batches that each rank of a pipeline has memory for. One holds its memory
            at least from its forward to its input gradient, so a rank without room for all that
            are on their way and back waits.
    """
    single, stages = placement.single, costs.stages
    last, cell = single.num_ranks - 1, placement.pipelines
    links = [
        costs.link(*single.rank_sites[rank : rank + 2]) if single.crosses_wan(rank) else None for rank in range(last)
    ]
    sent = [
        0.0 if link is None else link.transit_s(stages[rank].output_bytes) / cell for rank, link in enumerate(links)
    ]
    hop_s = [0.0 if link is None else sent[rank] + link.latency_s for rank, link in enumerate(links)]
    forward_s, backward_s, now_s = [0.0] * (last + 1), [0.0] * (last + 1), 0.0
    for rank in range(last + 1):
        forward_s[rank] = now_s
        now_s += stages[rank].forward_s + (hop_s[rank] if rank < last else 0.0)
    for rank in range(last, -1, -1):
        backward_s[rank] = now_s
        now_s += stages[rank].input_s + (hop_s[rank - 1] if rank else 0.0)
    weight_s = stages[0].weight_s
    bound_s = now_s + weight_s
    for rank, cost in enumerate(stages):
        first_s, through_s = forward_s[rank], (cost.forward_s + cost.input_s) * num_microbatches
        end_s = backward_s[rank] + cost.input_s
        after_s = max(cost.weight_s * num_microbatches, now_s - end_s + weight_s)
        bound_s = max(bound_s, first_s + through_s + after_s)
        if in_flight is not None:
            turns = num_microbatches / max(1, int(in_flight[rank]))
            bound_s = max(bound_s, first_s + (end_s - first_s) * turns + cost.weight_s)
    for rank, cost in enumerate(stages):  # a rank's one uplink carries activations down and gradients up
        ahead_s, held_s, left_s = [], [], []
        for hop, made_s in ((rank, forward_s[rank] + cost.forward_s), (rank - 1, backward_s[rank] + cost.input_s)):
            if 0 <= hop < last and (link := links[hop]) is not None:
                held_s.append(link.occupancy_s(stages[hop].output_bytes))
                bound_s = max(bound_s, now_s + weight_s + (num_microbatches * cell - 1) * sent[hop])
                ahead_s.append(made_s)
                left_s.append(now_s - made_s - held_s[-1] / cell)
        if held_s:
            bound_s = max(bound_s, min(ahead_s) + sum(held_s) * num_microbatches + min(left_s) + weight_s)
    return bound_s


def _scheduled(placement: Placement, count: int, costs: CostModel, cap_bytes: float, schedule: str) -> Latency:
    problem = Problem(placement, count, costs.for_cell(placement.pipelines))
    if schedule == "1f1b":
        rows = problem.rows(generate_1f1b(placement, count).rows)
        timing = time_rows(problem, rows)
        assert timing is not None, schedule
        return Latency(timing.makespan_s, tuple(map(problem.peak_bytes, rows)))
    found: list[tuple[float, Rows]] = []
    for rule in (backward_first(problem), atlas(problem, defer_weights=True)):
        scheduler = ListScheduler(problem, rule, cap_bytes * _ROUNDED_UP)
        found.append((scheduler.run(), scheduler.rows))
    step_s, rows = min(found, key=lambda entry: entry[0])
    return Latency(step_s, tuple(map(problem.peak_bytes, rows)))
