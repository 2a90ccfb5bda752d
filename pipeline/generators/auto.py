"""`auto`: a schedule made for the placement, the costs, the links and the memory at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate, generators
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_greedy import ListScheduler, Rule
from weft.pipeline.generators.auto_problem import NONE, Problem, Rows
from weft.pipeline.generators.auto_rules import backward_first, pair_kinds, rules
from weft.pipeline.generators.auto_search import Search
from weft.pipeline.generators.auto_strands import couple
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.lowering import add_transfers
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate

_ROUNDED_UP = 1 + 1e-9
"""Room for the rounding of sums of bytes."""
_FIRST_ACTIONS = 1_000_000
"""Actions that the list scheduler places, rule by rule, before the search (at least one rule)."""
_ACTIONS_PER_SECOND = 4_000_000
"""Actions that the search times in a nominal second."""


def generate_auto(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    memory_cap_bytes: float | None = None,
    search_seconds: float = 0.0,
) -> Schedule:
    """List scheduling by many rules, the best improved by a search (Atlas section 4.4 and further).

    The fixed schedules that go with the placement compete too, so the answer is at no cap
    worse than those that keep to it.

    Args:
        costs: seconds, bytes and links that the schedule is made for.
        memory_cap_bytes: saved activations per rank that are never exceeded. None or 0 leaves
            it to `auto`: an activation counts until its weight gradient is done, and the cap
            is what 1F1B holds (P micro-batches of the fullest rank's chunks), or the smallest
            of a few steps above it, up to four times as much, with which the list scheduler
            comes within 1 % of its best.
        search_seconds: nominal time for the search: a fixed amount of work, so that every
            rank finds the same schedule, whatever its load.

    Raises:
        ValueError: no schedule exists under the cap, or the costs are for another number of
            stages.
    """
    if len(costs.stages) != placement.num_stages:
        raise ValueError(
            f"costs.stages: costs of {len(costs.stages)} virtual stages, the placement has {placement.num_stages}"
        )
    problem = Problem(placement, num_microbatches, costs, until_weight=not memory_cap_bytes)
    cap_bytes = memory_cap_bytes or _default_cap_bytes(problem)
    _check_cap(problem, cap_bytes)
    cap_bytes *= _ROUNDED_UP
    if placement.pipelines > 1:
        alone = replace(costs.for_cell(1), stages=costs.stages[: placement.single.num_stages])
        one = generate_auto(placement.single, num_microbatches, alone, memory_cap_bytes, search_seconds)
        return _for_cell(problem, cap_bytes, one)
    rows = min(_starts(problem, cap_bytes), key=lambda start: start[0])[1]
    evaluations = int(search_seconds * _ACTIONS_PER_SECOND / sum(map(len, rows)))
    rows = Search(problem, rows, cap_bytes).run(evaluations, lower_bound_s(problem))
    rows = couple(problem, rows, cap_bytes)
    return Schedule("auto", placement, num_microbatches, tuple(tuple(map(problem.slot, row)) for row in rows))


def _for_cell(problem: Problem, cap_bytes: float, alone: Schedule) -> Schedule:
    """The best of many list schedules of all pipelines, whose shared uplinks are one resource.

    Beside them stands ``alone``, what a pipeline that shares nothing would do, on every pipeline.
    """
    placement, costs = problem.placement, problem.costs
    candidates = [side_by_side(alone, placement.pipelines)]
    for tried, rule in enumerate(rules(problem)):
        if tried and (tried + 1) * problem.num_nodes > _FIRST_ACTIONS:
            break
        _, rows = _list_schedule(problem, rule, cap_bytes)
        slots = tuple(tuple(map(problem.slot, _joined(problem, row))) for row in rows)
        candidates.append(Schedule("auto", placement, problem.num_microbatches, slots))
    return min(candidates, key=lambda cell: simulate(add_relays(add_transfers(cell), costs), costs).step_s)


def _joined(problem: Problem, row: list[int]) -> Iterator[int]:
    """The row with a full backward for each I that its W follows at once, where nobody waits for the gradient."""
    joined = NONE
    for node, following in pairwise([*row, NONE]):
        if node == joined:
            continue
        whole = problem.whole(node, following)
        if whole != NONE and problem.placement.is_first(problem.action(node).stage):
            joined = following
            yield whole
        else:
            yield node


def _starts(problem: Problem, cap_bytes: float) -> Iterator[tuple[float, Rows]]:
    """Makespans and rows to start from, all under the cap."""
    yield from _fixed(problem, cap_bytes)
    for tried, rule in enumerate(rules(problem)):
        if tried and (tried + 1) * problem.num_nodes > _FIRST_ACTIONS:
            return
        yield _list_schedule(problem, rule, cap_bytes)


def _fixed(problem: Problem, cap_bytes: float) -> Iterator[tuple[float, Rows]]:
    """The fixed kinds of schedule that go with the placement and the cap."""
    for kind, spec in generators().items():
        if spec.looks_at_costs:
            continue
        try:
            schedule = generate(kind, problem.placement, problem.num_microbatches)
        except ValueError:
            continue  # made for another placement, or for more micro-batches
        rows = problem.rows(schedule.rows)
        if problem.costs.pair_scale >= 1:
            rows = [[half for slot in row for half in problem.halves.get(slot, (slot,))] for row in rows]
        timing = time_rows(problem, rows)
        assert timing is not None, kind
        if all(problem.peak_bytes(row) <= cap_bytes for row in rows):
            yield timing.makespan_s, rows


def _list_schedule(problem: Problem, rule: Rule, cap_bytes: float) -> tuple[float, Rows]:
    scheduler = ListScheduler(problem, rule, cap_bytes)
    return scheduler.run(), scheduler.rows


def _default_cap_bytes(problem: Problem) -> float:
    """What 1F1B would hold, or the smallest step above it that is nearly as fast as the fastest."""
    held = max(problem.microbatch_bytes())
    if not held:
        return 1.0
    base, chunk = held * problem.placement.single.num_ranks, max(problem.at_start)
    caps = [base, base + chunk, *(base * more for more in (1.25, 1.5, 2.0, 3.0, 4.0))]
    first = [backward_first(problem, pair=pair) for pair in pair_kinds(problem)]
    times_s = [min(_list_schedule(problem, rule, cap * _ROUNDED_UP)[0] for rule in first) for cap in caps]
    return next(cap for cap, time_s in zip(caps, times_s, strict=True) if time_s <= 1.01 * min(times_s))


def _check_cap(problem: Problem, cap_bytes: float) -> None:
    held = problem.microbatch_bytes()
    rank = max(range(problem.num_ranks), key=held.__getitem__)
    if held[rank] > cap_bytes * _ROUNDED_UP:
        raise ValueError(
            f"pipeline.memory_cap_bytes={cap_bytes:g}: one micro-batch alone holds {held[rank]:g} bytes of activations "
            f"on rank {rank}, so no schedule exists; raise the cap to that, make micro-batches smaller, turn on "
            f"gradient checkpointing, or use more pipeline ranks"
        )
