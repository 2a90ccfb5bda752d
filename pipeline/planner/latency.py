"""The time of a pipeline's step: Atlas's ``get_latency_pp``, by list scheduling one DP-cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from weft.pipeline.action import Op
from weft.pipeline.costs import CostModel
from weft.pipeline.generators.auto_bound import sending_bound_s
from weft.pipeline.generators.auto_greedy import ListScheduler, Rule
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.auto_rules import atlas, backward_first, critical_path
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.generators.one_f_one_b import generate_1f1b
from weft.pipeline.placement import Placement

_EQUAL = 1e-6
_RULES = {1: ("backward first", "atlas"), 2: ("critical path", "backward first")}
"""Rules that are tried, by a rank's virtual stages; of all that `auto` has, those that do best together."""
_ROUNDED_UP = 1 + 1e-9
"""Tolerance for rounding errors in sums of bytes."""


@dataclass(frozen=True)
class Latency:
    """The predicted time and memory of one step of a pipeline.

    Attributes:
        step_s: seconds until the last rank has computed its last gradient.
        peak_bytes: by rank, the peak bytes of activations.
    """

    step_s: float
    peak_bytes: tuple[float, ...]

    def fits(self, rooms: Sequence[float]) -> bool:
        """True if no rank's peak exceeds its bytes in ``rooms``, which are those of one pipeline."""
        return all(peak <= rooms[rank % len(rooms)] for rank, peak in enumerate(self.peak_bytes))


def pipeline_latency(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    cap_bytes: float,
    schedule: str = "auto",
    enough_s: float = 0.0,
    rooms: Sequence[float] = (inf,),
) -> Latency:
    """Return the step of a DP-cell by a list scheduler or 1F1B; later, `auto` improves it by a search.

    For many micro-batches, only the first ones are scheduled. The rest follows from the period with which the
    pipeline repeats itself.

    Args:
        costs: costs of one pipeline.
        cap_bytes: maximum activation bytes of a rank.
        schedule: ``auto`` or ``1f1b``.
        enough_s: stop trying rules once a step is this short.
        rooms: by rank of a pipeline, the bytes that fit. A rule that needs more is taken only if no other one fits.
    """

    def cost(one: Latency) -> tuple[bool, float]:
        return not one.fits(rooms), one.step_s

    first, *others = _RULES[len(placement.legs)] if schedule == "auto" else (schedule,)
    best = _latency(placement, num_microbatches, costs, cap_bytes, first)
    for rule in others:
        if cost(best) > (False, enough_s):
            best = min(best, _latency(placement, num_microbatches, costs, cap_bytes, rule), key=cost)
    return best


def _latency(placement: Placement, num_microbatches: int, costs: CostModel, cap_bytes: float, rule: str) -> Latency:
    """Extrapolate a step by one rule from a prefix that the same rule scheduled."""
    first = first_microbatches(placement.single.num_stages)
    if num_microbatches <= first:
        return _scheduled(placement, num_microbatches, costs, cap_bytes, rule)[0]
    latency, finished_s = _scheduled(placement, first, costs, cap_bytes, rule)
    period, period_s = _period(finished_s)
    busiest_s = max(sum(costs.stages[stage].compute_s for stage in held) for held in placement.single.rank_stages)
    period_s = max(period_s, period * busiest_s)  # weight gradients may be put off, but not for ever
    shorter = first - (first - num_microbatches) % period
    if shorter < first:
        latency, _ = _scheduled(placement, shorter, costs, cap_bytes, rule)
    return replace(latency, step_s=latency.step_s + (num_microbatches - shorter) // period * period_s)


def _period(finished_s: Sequence[float]) -> tuple[int, float]:
    """Return the period of a pipeline in micro-batches and in seconds, or (1, average) if it is not periodic.

    Only the middle half is examined, during which the pipeline is full.

    Args:
        finished_s: when each micro-batch has finished its backward.
    """
    begin, end = len(finished_s) // 4, 3 * len(finished_s) // 4
    pauses_s = [after - before for before, after in pairwise(finished_s[begin : end + 1])]
    average_s = sum(pauses_s) / len(pauses_s)
    for period in range(1, len(pauses_s) // 2 + 1):
        if all(
            abs(after - before) < _EQUAL * average_s
            for before, after in zip(pauses_s[:-period], pauses_s[period:], strict=True)
        ):
            return period, sum(pauses_s[-period:])
    return 1, average_s


def first_microbatches(num_stages: int) -> int:
    """Return up to how many micro-batches a pipeline of ``num_stages`` virtual stages is scheduled completely."""
    return max(4 * num_stages + 8, 32)


def latency_bound_s(
    placement: Placement, num_microbatches: int, costs: CostModel, in_flight: Sequence[float] = ()
) -> float:
    """Return the lower bound of a DP-cell's step for any schedule: `lower_bound_s` without a `Problem`.

    Args:
        in_flight: by virtual stage, how many of its micro-batches would fit the memory of its rank if the rank held no
            other stage; empty ignores memory. A micro-batch occupies memory at least from the stage's forward to its
            input gradient. So each occupies ``1 / in_flight`` of the memory for that time, and others have to wait if
            the memory is full. On a rank with several stages, their shares add up.
    """
    single, stages = placement.single, costs.stages
    last, cell, count = single.num_stages - 1, placement.pipelines, num_microbatches
    ranks, pooled = single.stage_ranks, [cell if single.crosses_wan(stage) else 1 for stage in range(last)]
    links = [
        None if here == there else costs.link(single.rank_sites[here], single.rank_sites[there])
        for here, there in pairwise(ranks)
    ]
    sent = [
        0.0 if link is None else link.transit_s(cost.output_bytes) / many
        for link, cost, many in zip(links, stages, pooled, strict=False)
    ]
    hop_s = [0.0 if link is None else sent[stage] + link.latency_s for stage, link in enumerate(links)]
    forward_s, backward_s, now_s = [0.0] * (last + 1), [0.0] * (last + 1), 0.0
    for stage in range(last + 1):
        forward_s[stage] = now_s
        now_s += stages[stage].forward_s + (hop_s[stage] if stage < last else 0.0)
    for stage in range(last, -1, -1):
        backward_s[stage] = now_s
        now_s += stages[stage].input_s + (hop_s[stage - 1] if stage else 0.0)
    end_of_s = [backward_s[stage] + stages[stage].input_s for stage in range(last + 1)]
    weight_s = stages[0].weight_s
    bound_s = now_s + weight_s
    for held in single.rank_stages:
        first_s, end_s = forward_s[held[0]], backward_s[held[0]] + stages[held[0]].input_s
        through_s = sum(stages[stage].forward_s + stages[stage].input_s for stage in held) * count
        weights_s = sum(stages[stage].weight_s for stage in held) * count
        bound_s = max(bound_s, first_s + through_s + max(weights_s, now_s - end_s + weight_s))
        shares_s = 0.0
        for stage in held if in_flight else ():
            shares_s += (end_of_s[stage] - forward_s[stage]) / max(1.0, in_flight[stage])
            turns = count / max(1, int(in_flight[stage]))
            back_s = end_of_s[stage] - forward_s[stage]
            bound_s = max(bound_s, forward_s[stage] + back_s * turns + stages[stage].weight_s)
        least_weight_s = min(stages[stage].weight_s for stage in held)
        bound_s = max(bound_s, first_s + count * shares_s / _ROUNDED_UP + least_weight_s)
        # A rank's one uplink carries activations down and gradients up, the link to each other rank some of them.
        # Inside of a site, each of both has a lane of its own.
        loads: dict[int | str | None, list[tuple[float, float, float]]] = {}
        for stage in held:
            down = (stage, forward_s[stage] + stages[stage].forward_s, stage + 1)
            up = (stage - 1, backward_s[stage] + stages[stage].input_s, stage - 1)
            for hop, made_s, to in (down, up):
                if 0 <= hop < last and (link := links[hop]) is not None:
                    held_s = link.occupancy_s(stages[hop].output_bytes) / pooled[hop]
                    is_wan = single.crosses_wan(hop)
                    uplink = None if is_wan else "down" if to > stage else "up"
                    loads.setdefault(uplink, []).append((made_s, held_s, now_s - made_s - held_s))
                    if is_wan:
                        over = loads.setdefault(ranks[to], [])
                        over.append((made_s, sent[hop], now_s - made_s - sent[hop]))
        for lane, transfers in loads.items():
            many = count if isinstance(lane, str) else cell * count
            bound_s = max(bound_s, sending_bound_s(transfers, many) + weight_s)
    return bound_s


def _scheduled(
    placement: Placement, count: int, costs: CostModel, cap_bytes: float, rule: str
) -> tuple[Latency, list[float]]:
    """Return the whole step by one rule, and when each micro-batch has returned to the first rank."""
    problem = Problem(placement, count, costs.for_cell(placement.pipelines))
    if rule == "1f1b":
        rows = problem.rows(generate_1f1b(placement, count).rows)
        timing = time_rows(problem, rows)
        assert timing is not None, rule
        finished_s = sorted(timing.end_s[node] for node in rows[0] if problem.op(node) is Op.B)
        return Latency(timing.makespan_s, tuple(map(problem.peak_bytes, rows))), finished_s
    scheduler = ListScheduler(problem, _rule(problem, rule), cap_bytes * _ROUNDED_UP)
    scheduler.run()
    timing = time_rows(problem, scheduler.rows)  # the scheduler lets ranks wait for actions that it prefers
    assert timing is not None, rule
    return Latency(timing.makespan_s, tuple(map(problem.peak_bytes, scheduler.rows))), scheduler.finished_s


def _rule(problem: Problem, name: str) -> Rule:
    if name == "critical path":
        return critical_path(problem, pace=0.5, weight_delay=inf, wait_share=0.3)
    return backward_first(problem) if name == "backward first" else atlas(problem, defer_weights=True)
