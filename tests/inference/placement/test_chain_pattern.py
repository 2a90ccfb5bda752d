"""Laws of a pipeline's slots: they lie in bubbles of every stage, in order, and never overlap in any period."""

import random
from itertools import pairwise

import numpy as np
import pytest

from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.chain_pattern import chain_pattern, joined, slots_of
from weft.inference.placement.prefill_placement import PrefillPlacement

PERIOD_S, HOP_S, OVERHEAD_S = 2.0, 0.002, 0.004
CASES = range(40)
SLACK_S = 1e-6


def bubbles(draw):
    found, at_s = [], draw.choice([0.0, draw.uniform(0.0, 0.3)])
    while (end_s := at_s + draw.uniform(0.003, 0.2)) < PERIOD_S:
        found.append((at_s, end_s))
        at_s = end_s + draw.uniform(0.01, 0.4)
    if draw.random() < 0.5 and at_s < PERIOD_S:
        found.append((at_s, PERIOD_S))
    return found


def slots(draw, stages, longest_s=0.05):
    given = [joined(bubbles(draw), PERIOD_S) for _ in range(stages)]
    longest_s = min([longest_s, *(max(end - start for start, end in spans) for spans in given)])
    return given, slots_of(given, PERIOD_S, hop_s=HOP_S, shortest_s=OVERHEAD_S, longest_s=longest_s)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_a_slot_lies_in_a_bubble_of_each_stage_after_the_stage_before(stages):
    for seed in CASES:
        given, found = slots(random.Random(seed), stages)
        assert found, "some work fits"
        first_s = found[0][0][0]
        for begins_s, length_s in found:
            assert length_s > OVERHEAD_S and first_s <= begins_s[0] < first_s + PERIOD_S
            for one_s, next_s in pairwise(begins_s):
                assert next_s >= one_s + length_s + HOP_S - SLACK_S
            for spans, begin_s in zip(given, begins_s, strict=True):
                repeated = [(a + n * PERIOD_S, b + n * PERIOD_S) for n in range(-20, 2 * stages + 20) for a, b in spans]
                assert any(a - SLACK_S <= begin_s and begin_s + length_s <= b + SLACK_S for a, b in repeated)


def test_slots_do_not_wait_between_ranks_that_are_idle_together():
    """They are as late as they can be in the first stages, so a prompt waits at most for the slot before its own."""
    spans = [(0.1, 0.5), (0.9, 1.6)]
    found = slots_of([spans] * 4, PERIOD_S, hop_s=HOP_S, shortest_s=OVERHEAD_S, longest_s=0.02)
    at_once = sum(begins_s[-1] - begins_s[0] <= 3 * (2 * 0.02 + HOP_S) for begins_s, _ in found)
    assert at_once > 0.8 * len(found)


@pytest.mark.parametrize("stages", [2, 5])
def test_slots_of_all_periods_are_disjoint_at_every_stage(stages):
    for seed in CASES:
        _, found = slots(random.Random(seed), stages)
        for stage in range(stages):
            phases = sorted((begins_s[stage] % PERIOD_S, length_s) for begins_s, length_s in found)
            phases.append((phases[0][0] + PERIOD_S, 0.0))
            assert all(one + length_s <= other + SLACK_S for (one, length_s), (other, _) in pairwise(phases))


def test_a_pipeline_of_one_stage_has_the_capacity_of_its_bubbles():
    for seed in CASES:
        draw = random.Random(seed)
        given = bubbles(draw)
        chain = chain_pattern([given], PERIOD_S, hop_s=HOP_S, overhead_s=OVERHEAD_S, guard_s=0.002, longest_s=9.0)
        alone = BubblePattern(given, PERIOD_S, overhead_s=OVERHEAD_S, guard_s=0.002)
        assert chain.capacity_s == pytest.approx(alone.capacity_s)
        for _ in range(20):
            free_s, work_s = draw.uniform(0.0, 20.0), draw.uniform(0.001, 3.0)
            assert chain.end(free_s, work_s) == pytest.approx(alone.end(free_s, work_s))
            assert chain.begin(free_s) == pytest.approx(alone.begin(free_s))


@pytest.mark.parametrize("stages", [2, 4])
def test_work_leaves_a_pipeline_in_order_and_after_it_has_entered(stages):
    for seed in CASES:
        draw = random.Random(seed)
        chain = chain_pattern([bubbles(draw) for _ in range(stages)], PERIOD_S, hop_s=HOP_S, overhead_s=OVERHEAD_S)
        free_s = last_s = draw.uniform(0.0, 9.0)
        for _ in range(20):
            work_s = draw.uniform(0.001, 0.2)
            end_s, next_s = chain.end(free_s, work_s), chain.free(free_s, work_s)
            assert end_s >= next_s + chain.least_delay_s - SLACK_S >= free_s + work_s
            assert end_s >= last_s
            entered = sum(stop_s - start_s - OVERHEAD_S for start_s, stop_s in chain.spans(free_s, work_s))
            assert entered == pytest.approx(work_s)
            free_s, last_s = next_s, end_s
        times_s = np.array([draw.uniform(0.0, 9.0) for _ in range(50)])
        assert chain.positions(times_s) == pytest.approx([chain.position(time_s) for time_s in times_s])
        places = chain.positions(times_s) + 0.01
        assert chain.times(places) == pytest.approx([chain.time(place) for place in places])


def test_a_prompt_gets_the_pipeline_that_finishes_it_first():
    draw = random.Random(3)
    patterns = [
        chain_pattern(
            [bubbles(draw) for _ in range(4)], PERIOD_S, hop_s=HOP_S, overhead_s=OVERHEAD_S, origin_s=draw.random()
        )
        for _ in range(30)
    ]
    placement, frees_s = PrefillPlacement(PERIOD_S), [0.0] * len(patterns)
    for worker, pattern in enumerate(patterns):
        placement.set(worker, pattern, 0.0)
    now_s = 0.0
    for _ in range(400):
        now_s += draw.expovariate(40.0)
        work_s = draw.uniform(0.001, 0.3)
        slot = placement.find(now_s, work_s)
        ends_s = [p.end(max(now_s, free_s), work_s) for p, free_s in zip(patterns, frees_s, strict=True)]
        assert slot.end_s == pytest.approx(min(ends_s), abs=2e-6)
        placement.take(slot)
        frees_s[slot.worker] = slot.free_s


class Counted(list):
    """Bubbles that count how often they are read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_many_bubbles_are_not_searched_for_each_slot():
    """A deadline of minutes covers thousands of bubbles, and the controller repeats this every second."""
    draw, period_s = random.Random(4), 600.0
    given = [
        Counted((at_s, at_s + draw.uniform(0.02, 0.2)) for at_s in np.arange(0.0, period_s, 0.3)) for _ in range(2)
    ]
    found = slots_of(given, period_s, hop_s=HOP_S, shortest_s=OVERHEAD_S, longest_s=0.02)
    assert len(found) > 2000 and sum(spans.reads for spans in given) < 50 * len(found)
