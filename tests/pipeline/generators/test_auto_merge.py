"""The last pass of `auto`: what it merges delays nothing, and what it leaves could not be merged so."""

from random import Random

import pytest

from tests.pipeline.generators.test_list_scheduler import PLACEMENTS, TICK_S, random_rule, uneven
from weft.pipeline.action import Op
from weft.pipeline.generators.auto_greedy import ListScheduler
from weft.pipeline.generators.auto_merge import merge_neighbours
from weft.pipeline.generators.auto_problem import NONE, Problem
from weft.pipeline.generators.auto_timing import time_rows

LAST = 1_000_000.0


def whole(problem, slot):
    return problem.op(slot) is Op.B


def halves(problem, row):
    """The row with full backwards as their halves again."""
    count = problem.num_microbatches
    both = [(slot - 2 * count, slot - count) if whole(problem, slot) else (slot,) for slot in row]
    return [part for parts in both for part in parts]


def starts_s(problem, rows):
    """When each half starts, and when each result arrives."""
    timing = time_rows(problem, rows)
    found = {}
    for slot in (slot for row in rows for slot in row):
        at_s = timing.end_s[slot] - problem.seconds[slot]
        found[halves(problem, [slot])[0]] = at_s
    return found, timing.arrival_s


def delayed(problem, before, rows):
    """True if a slot of rows starts later than before, or a result that is not one of a full backward comes later."""
    (starts, arrivals), (now, arrive) = before, starts_s(problem, rows)
    later = any(at_s > starts[node] for node, at_s in now.items())
    held = {problem.fact[slot] for row in rows for slot in row if whole(problem, slot)}
    made = {problem.fact[slot] for row in rows for slot in row} - held
    return later or any(arrive[fact] > arrivals[fact] for fact in made)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda one: f"{one.legs}{one.groups}")
def test_full_backwards_where_no_rank_waits_for_the_gradient(placement):
    random, merged_somewhere, left_somewhere = Random(1), 0, 0
    for _ in range(6):
        problem = Problem(placement, 5, uneven(placement, random), until_weight=True, tick_s=TICK_S)
        scheduler = ListScheduler(problem, random_rule(problem, random), LAST)
        scheduler.run()
        before, rows = starts_s(problem, scheduler.rows), merge_neighbours(problem, scheduler.rows, LAST)
        assert [halves(problem, row) for row in rows] == scheduler.rows
        assert not delayed(problem, before, rows)
        merged_somewhere += sum(whole(problem, slot) for row in rows for slot in row)
        for rank, row in enumerate(rows):
            for index, slot in enumerate(row[:-1]):
                both = problem.full_backward(slot, row[index + 1])
                at_s = before[0][slot] + problem.seconds[slot] if both != NONE else 0.0
                at_once = before[1][slot] == at_s + problem.transit_s[slot] + problem.latency_s[slot]
                if both != NONE and at_once:  # a transfer that has to queue is left alone
                    left_somewhere += 1
                    alone = scheduler.rows[rank]
                    at = alone.index(slot)
                    more = [*scheduler.rows[:rank], [*alone[:at], both, *alone[at + 2 :]], *scheduler.rows[rank + 1 :]]
                    assert delayed(problem, before, more)
    assert merged_somewhere and left_somewhere
