"""`auto`: generate a schedule for a given placement, costs, links and memory cap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from math import frexp, ldexp
from statistics import fmean

from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate, generators
from weft.pipeline.generators.auto_bound import lone_microbatch, lower_bound_s, pace_s
from weft.pipeline.generators.auto_greedy import ListScheduler, Rule
from weft.pipeline.generators.auto_jitter import improve_samples
from weft.pipeline.generators.auto_merge import merge_neighbours
from weft.pipeline.generators.auto_problem import Problem, Rows
from weft.pipeline.generators.auto_rules import backward_first, pair_kinds, rules
from weft.pipeline.generators.auto_search import Search
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.jitter import has_jitter
from weft.pipeline.lowering import as_run, lower
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import sampled_steps_s, simulate

_ROUNDED_UP = 1 + 1e-9
"""Tolerance for rounding errors in sums of bytes."""
_TICK_BITS, _CLOCK_BITS, _LEAST_EXPONENT = 20, 50, -1000
"""A tick is 2**-20 of the pace, or 2**-50 of a step without any parallelism if that is longer."""
_FIRST_ACTIONS = 1_000_000
"""Maximum number of actions that the list scheduler places over all rules; it tries at least one rule."""
_QUICK_RULES = 8
"""Rules that `quick_step_s` tries."""
_ACTIONS_PER_SECOND = 4_000_000
"""Actions that the search evaluates per nominal second."""


def generate_auto(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    memory_cap_bytes: float | None = None,
    search_seconds: float = 0.0,
    jitter_samples: int = 0,
) -> Schedule:
    """Try list scheduling with many rules, and improve the best by a search (extends Atlas section 4.4).

    The fixed schedules for this placement are candidates too. So the result is at least as good as the
    fixed schedules that fit under the cap. The pipelines of a DP-cell are scheduled together.

    Args:
        costs: seconds, bytes and links; for a DP-cell, of the cell (see `CostModel.for_cell`).
        memory_cap_bytes: hard limit on the activation memory of any rank. None and 0 select `own_cap_bytes`. In that
            case an activation counts until its weight gradient is done, and a fixed schedule that exceeds the cap is
            returned if it is faster.
        search_seconds: nominal time of the search. It is a fixed amount of work, so that every
            rank finds the same schedule whatever its load.
        jitter_samples: number of sampled steps whose mean the result is improved by, within the same cap, in as much
            time again. 0 plans with the medians only.

    Raises:
        ValueError: no schedule fits under the cap, the costs are for another number of stages, or they have no jitter
            to sample.
    """
    schedule = _by_medians(placement, num_microbatches, costs, memory_cap_bytes, search_seconds)
    if not jitter_samples:
        return schedule
    if not has_jitter(costs):
        raise ValueError(
            f"pipeline.jitter_samples={jitter_samples}: the costs have no jitter to sample; give the file in "
            "pipeline.costs_file `jitter`, as a run with train.timeline=true does, or set pipeline.jitter_samples=0"
        )
    problem = _problem(
        placement, num_microbatches, costs, until_weight=not memory_cap_bytes, samples=2 * jitter_samples
    )
    planned = problem.rows(schedule.rows)
    cap_bytes = memory_cap_bytes or own_cap_bytes(placement, num_microbatches, costs)
    cap_bytes = max(cap_bytes * _ROUNDED_UP, *map(problem.peak_bytes, planned))
    fixed = (rows for _, rows in _fixed(problem) if _fits(problem, rows, cap_bytes))
    others = (*fixed, *(rows for _, rows in _list_schedules(problem, cap_bytes)))
    rows = improve_samples(problem, planned, others, cap_bytes, search_seconds * _ACTIONS_PER_SECOND)
    found = _schedule(problem, rows)
    if not _ends_differ(costs):
        return found
    return min((schedule, found), key=lambda one: _mean_step_s(one, costs, problem.samples))


def _by_medians(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    memory_cap_bytes: float | None,
    search_seconds: float,
) -> Schedule:
    problem = _problem(placement, num_microbatches, costs, until_weight=not memory_cap_bytes)
    cap_bytes = memory_cap_bytes or own_cap_bytes(placement, num_microbatches, costs)
    _check_cap(problem, cap_bytes)
    cap_bytes *= _ROUNDED_UP
    every = list(_fixed(problem))
    fixed = [timed for timed in every if _fits(problem, timed[1], cap_bytes)]
    starts = [*fixed, *_list_schedules(problem, cap_bytes)]
    if placement.pipelines > 1:  # half of the time for a single pipeline, repeated side by side
        search_seconds /= 2
        alone = replace(costs.for_cell(1), stages=costs.stages[: placement.single.num_stages])
        one = _by_medians(placement.single, num_microbatches, alone, memory_cap_bytes, search_seconds)
        starts.append(_time_schedule(problem, side_by_side(one, placement.pipelines)))
    rows = min(starts, key=lambda start: start[0])[1]
    evaluations = int(search_seconds * _ACTIONS_PER_SECOND / sum(map(len, rows)))
    merged = merge_neighbours(
        problem, Search(problem, rows, cap_bytes).run(evaluations, lower_bound_s(problem)), cap_bytes
    )
    others = every if not memory_cap_bytes else fixed if _ends_differ(costs) else []
    schedules = [_schedule(problem, rows) for rows in (merged, *(rows for _, rows in others))]
    if len(schedules) == 1:
        return schedules[0]
    steps_s = [_step_s(schedule, costs) for schedule in schedules]
    # The first, which keeps to the cap, unless another is shorter by more than rounding.
    return next(one for one, step_s in zip(schedules, steps_s, strict=True) if step_s <= min(steps_s) * _ROUNDED_UP)


def quick_step_s(placement: Placement, num_microbatches: int, costs: CostModel, cap_bytes: float) -> float:
    """Return the seconds of a step by a few rules of the list scheduler, to compare costs of the same placement.

    Raises:
        ValueError: no schedule fits under the cap.
    """
    problem = _problem(placement, num_microbatches, costs, until_weight=False)
    _check_cap(problem, cap_bytes)
    tried = islice(rules(problem), _QUICK_RULES)
    return min(_list_schedule(problem, rule, cap_bytes * _ROUNDED_UP)[0] for rule in tried)


@lru_cache(maxsize=16)
def own_cap_bytes(placement: Placement, num_microbatches: int, costs: CostModel) -> float:
    """Return the memory cap that `auto` uses if the caller sets none.

    The first choice is the memory of 1F1B: P micro-batches of the fullest rank's chunks. A larger cap, up to four
    times as much, is taken if the list scheduler needs it to come within 1 % of its best; the smallest such cap wins.
    """
    problem = _problem(placement, num_microbatches, costs, until_weight=True)
    held = max(problem.microbatch_bytes())
    if not held:
        return 1.0
    base, chunk = held * problem.placement.single.num_ranks, max(problem.start_bytes)
    caps = [base, base + chunk, *(base * more for more in (1.25, 1.5, 2.0, 3.0, 4.0))]
    first = [backward_first(problem, pair=pair) for pair in pair_kinds(problem)]
    times_s = [min(_list_schedule(problem, rule, cap * _ROUNDED_UP)[0] for rule in first) for cap in caps]
    return next(cap for cap, time_s in zip(caps, times_s, strict=True) if time_s <= 1.01 * min(times_s))


def _schedule(problem: Problem, rows: Rows) -> Schedule:
    slots = tuple(tuple(map(problem.slot, row)) for row in rows)
    return Schedule("auto", problem.placement, problem.num_microbatches, slots)


def _ends_differ(costs: CostModel) -> bool:
    """True if reductions, all-gathers or optimiser steps take time, so that the shortest rows may not be best."""
    return any(stage.reduce_s or stage.unshard_s or stage.step_s for stage in costs.stages)


def _problem(
    placement: Placement, num_microbatches: int, costs: CostModel, *, until_weight: bool, samples: int = 0
) -> Problem:
    """Return the problem, with times in ticks of a millionth of the pace, or coarser if a step is very long."""
    costs.require_stages(placement.num_stages)
    one = Problem(placement, 1, costs)
    step_s = (lone_microbatch(one)[2] + pace_s(one)) * num_microbatches
    exponent = max(frexp(pace_s(one))[1] - _TICK_BITS, frexp(step_s)[1] - _CLOCK_BITS, _LEAST_EXPONENT)
    return Problem(placement, num_microbatches, costs, until_weight, ldexp(1.0, exponent), samples=samples)


def _list_schedules(problem: Problem, cap_bytes: float) -> Iterator[tuple[float, Rows]]:
    """Yield the makespan and rows of each rule in order, until ``_FIRST_ACTIONS`` actions are scheduled."""
    for tried, rule in enumerate(rules(problem)):
        if tried and (tried + 1) * problem.num_nodes > _FIRST_ACTIONS:
            return
        yield _list_schedule(problem, rule, cap_bytes)


def _fits(problem: Problem, rows: Rows, cap_bytes: float) -> bool:
    return all(problem.peak_bytes(row) <= cap_bytes for row in rows)


def _fixed(problem: Problem) -> Iterator[tuple[float, Rows]]:
    """Yield the makespan and rows of each fixed schedule that fits the placement."""
    placement = problem.placement
    for kind, spec in generators().items():
        if spec.looks_at_costs:
            continue
        try:
            schedule = generate(kind, placement.single, problem.num_microbatches)
        except ValueError:
            continue  # it needs another placement, or more micro-batches
        schedule = side_by_side(as_run(schedule, problem.costs), placement.pipelines)
        yield _time_schedule(problem, schedule)


def _time_schedule(problem: Problem, schedule: Schedule) -> tuple[float, Rows]:
    rows = problem.rows(schedule.rows)
    timing = time_rows(problem, rows)
    assert timing is not None, schedule.name
    return timing.makespan_s, rows


def _step_s(schedule: Schedule, costs: CostModel) -> float:
    """Return the simulated seconds of a step, including reductions and the optimiser."""
    return simulate(add_relays(lower(schedule), costs), costs).step_s


def _mean_step_s(schedule: Schedule, costs: CostModel, samples: int) -> float:
    return fmean(sampled_steps_s(add_relays(lower(schedule), costs), costs, range(samples)))


def _list_schedule(problem: Problem, rule: Rule, cap_bytes: float) -> tuple[float, Rows]:
    scheduler = ListScheduler(problem, rule, cap_bytes)
    makespan_s = scheduler.run()
    if problem.shared:  # the list scheduler assigns shared uplinks when actions start, not when they end
        timing = time_rows(problem, scheduler.rows)
        assert timing is not None
        makespan_s = timing.makespan_s
    return makespan_s, scheduler.rows


def _check_cap(problem: Problem, cap_bytes: float) -> None:
    held = problem.microbatch_bytes()
    rank = max(range(problem.num_ranks), key=held.__getitem__)
    if held[rank] > cap_bytes * _ROUNDED_UP:
        raise ValueError(
            f"pipeline.memory_cap_bytes={cap_bytes:g}: one micro-batch alone holds {held[rank]:g} bytes of activations "
            f"on rank {rank}, so no schedule exists; raise the cap to that, make micro-batches smaller, set "
            f"pipeline.recompute=auto, or use more pipeline ranks"
        )
