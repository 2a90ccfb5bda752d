"""Placement against brute force: inside bubbles, after arrival, finished soonest."""

from itertools import count
from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.placement.prefill_placement import PrefillPlacement
from weft.inference.placement.prompt_work import PromptWork

PERIOD = 64
"""All times are whole numbers, which floats represent exactly."""


@st.composite
def bubbles(draw):
    edges = sorted(draw(st.sets(st.integers(0, PERIOD), max_size=8)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@st.composite
def fleets(draw):
    overhead, guard = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    kinds = draw(st.lists(st.tuples(bubbles(), st.integers(0, PERIOD)), min_size=1, max_size=3))
    rows = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    return rows, overhead, guard


def windows(rows, origin, guard):
    """The bubbles one after the other, those that touch joined, from before time 0 on."""
    joined = []
    for cycle in count(-2) if rows else ():
        for start, end in rows:
            start, end = (edge + origin + cycle * PERIOD for edge in (start, end))
            if joined and joined[-1][1] == start and (end - start < PERIOD):
                start = joined.pop()[0]
            joined.append((start, end))
        while len(joined) > 1:
            start, end = joined.pop(0)
            yield start, end - guard


def run(rows, origin, overhead, guard, free, work):
    """Walk from bubble to bubble: the spans of the work."""
    if not any(
        end - start > overhead for _, (start, end) in zip(range(12), windows(rows, origin, guard), strict=False)
    ):
        return []
    spans = []
    for start, end in windows(rows, origin, guard):
        begin = max(start, free)
        room = end - begin - overhead
        if room <= 0:
            continue
        done = min(work, room)
        spans.append((begin, begin + overhead + done))
        work -= done
        if not work:
            return spans
    return spans


def whole(low, high):
    return st.integers(low, high).map(float)


ACROSS = ((0, 9), (20, 31), (50, PERIOD))
"""The last bubble of a step goes on as the first of the next."""


@example(rows=ACROSS, origin=0.0, overhead=0.0, guard=0.0, free=0.0, work=150.0)
@example(rows=ACROSS, origin=7.0, overhead=2.0, guard=1.0, free=60.0, work=150.0)
@example(rows=ACROSS[::2], origin=7.0, overhead=2.0, guard=1.0, free=60.0, work=150.0)
@given(
    rows=bubbles(),
    origin=whole(0, PERIOD),
    overhead=whole(0, 3),
    guard=whole(0, 3),
    free=whole(0, 300),
    work=whole(1, 200),
)
def test_work_runs_in_the_first_bubbles_and_only_there(rows, origin, overhead, guard, free, work):
    pattern = BubblePattern(rows, PERIOD, origin_s=origin, overhead_s=overhead, guard_s=guard)
    spans = run(rows, origin, overhead, guard, free, work)
    assert list(pattern.spans(free, work)) == spans
    assert pattern.begin(free) == (spans[0][0] if spans else inf)
    assert pattern.end(free, work) == (spans[-1][1] if spans else inf)
    # What fits into a period, by the windows that begin in one.
    seen = zip(range(12), windows(rows, origin, guard), strict=False)
    kept = [end - start for _, (start, end) in seen if 0 <= start < PERIOD and end - start > overhead]
    assert (pattern.open_s, pattern.capacity_s) == (sum(kept), sum(kept) - overhead * len(kept))
    assert (pattern.period_s, pattern.overhead_s) == (PERIOD, overhead)
    later = BubblePattern(rows, PERIOD, origin_s=origin + 3 * PERIOD, overhead_s=overhead, guard_s=guard)
    assert pattern == later and hash(pattern) == hash(later)
    assert pattern != BubblePattern(rows, PERIOD, origin_s=origin + 1, overhead_s=overhead, guard_s=guard)
    assert pattern != BubblePattern(rows, PERIOD, origin_s=origin, overhead_s=overhead + 0.5, guard_s=guard)


@example(rows=ACROSS, origin=5.0, overhead=1.0, asked=[0.0, 10.0, 25.0, 60.0, 64.0, 70.0])
@given(rows=bubbles(), origin=whole(0, PERIOD), overhead=whole(0, 3), asked=st.lists(whole(-99, 300), min_size=1))
def test_many_at_once_are_the_same(rows, origin, overhead, asked):
    pattern = BubblePattern(rows, PERIOD, origin_s=origin, overhead_s=overhead)
    if pattern.capacity_s:
        assert list(pattern.positions(np.array(asked))) == [pattern.position(time) for time in asked]
        assert list(pattern.times(np.array(asked))) == [pattern.time(position) for position in asked]


@settings(deadline=None)  # tables are made in every example
@given(fleet=fleets(), requests=st.lists(st.tuples(whole(0, 40), whole(1, 80)), min_size=1, max_size=12))
def test_every_prompt_finishes_as_soon_as_any_worker_could(fleet, requests):
    rows, overhead, guard = fleet
    placement, free = PrefillPlacement(PERIOD), dict.fromkeys(range(len(rows)), 0.0)
    for worker, (row, origin) in enumerate(rows):
        pattern = BubblePattern(row, PERIOD, origin_s=origin, overhead_s=overhead, guard_s=guard)
        placement.set(worker, pattern, 0.0)
    now = 0.0
    for gap, work in requests:
        now += gap
        spans = {w: run(*rows[w], overhead, guard, max(now, free[w]), work) for w in free}
        soonest = min((spans[w][-1][1] for w in free if spans[w]), default=None)
        slot = placement.find(now, work)
        if soonest is None:
            assert slot is None
            continue
        chosen = spans[slot.worker]
        assert (slot.begin_s, slot.end_s) == (chosen[0][0], chosen[-1][1])
        assert slot.end_s == soonest
        assert slot.begin_s >= now
        placement.take(slot)
        free[slot.worker] = slot.end_s


def test_what_is_known_of_a_worker_can_change():
    early = BubblePattern([(0, 10)], 20)
    late = BubblePattern([(5, 15)], 20)
    placement = PrefillPlacement(20)
    assert placement.find(0, 1) is None
    placement.set(0, early, 0.0)
    placement.set(1, late, 0.0)
    assert placement.find(0, 1).worker == 0
    placement.set(0, early, 8.0)  # it has more to do than was thought
    assert placement.find(0, 1) == (1, 5.0, 6.0, 6.0)
    placement.set(0, late, 0.0)
    placement.remove(1)
    assert placement.find(6, 1) == (0, 6.0, 7.0, 7.0)
    placement.remove(0)
    placement.remove(0)
    assert placement.find(6, 1) is None
    placement.set(2, early, 7.0)
    assert placement.find(6, 1) == (2, 7.0, 8.0, 8.0)


def test_a_pattern_of_another_period_is_refused_and_one_without_room_is_nobodys():
    placement = PrefillPlacement(20)
    with pytest.raises(ValueError, match="the pattern's period is 10 s, the run's 20 s"):
        placement.set(0, BubblePattern([(0, 5)], 10), 0.0)
    placement.set(0, BubblePattern([(0, 5)], 20), 0.0)
    assert placement.find(0, 1) is not None
    placement.set(0, BubblePattern([(0, 5)], 20, guard_s=5.0), 0.0)
    assert placement.find(0, 1) is None


@given(
    chunks=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    cached=st.integers(0, 500),
)
def test_the_work_of_a_prompt_does_not_depend_on_its_chunks(chunks, cached):
    cost = PromptWork(step_s=0.005, token_s=1e-4, context_s=1e-8, chunk_tokens=10_000)
    context, seconds = cached, 0.0
    for tokens in chunks:
        seconds += cost.chunk_s(tokens, context) - cost.step_s
        context += tokens
    assert seconds == pytest.approx(cost.work_s(context, cached))


@given(
    rows=bubbles(),
    free=whole(0, PERIOD),
    tokens=st.integers(1, 3000),
    cached=st.integers(0, 500),
    chunk=st.integers(50, 2048),
)
def test_whole_tokens_granted_bubble_by_bubble_end_in_time(rows, free, tokens, cached, chunk):
    """A worker that computes whole tokens in engine steps of bounded size keeps what was predicted."""
    cost = PromptWork(step_s=0.25, token_s=0.03125, context_s=2**-20, chunk_tokens=chunk, max_tokens=4096)
    pattern = BubblePattern(rows, PERIOD, overhead_s=cost.overhead_s)
    end = pattern.end(free, cost.work_s(tokens + cached, cached))
    context, clock = cached, free
    for opens, closes in windows(rows, 0, 0) if end < inf else ():
        clock = max(clock, opens)
        while clock < closes and context < tokens + cached:
            fits = [
                n
                for n in range(1, min(chunk, tokens + cached - context) + 1)
                if clock + cost.chunk_s(n, context) <= closes
            ]
            if not fits:
                break
            clock += cost.chunk_s(fits[-1], context)
            context += fits[-1]
        if context == tokens + cached:
            break
    assert end == inf or clock <= end + 1e-6


@pytest.mark.parametrize("rows", [[(0, 65)], [(-1, 3)], [(5, 3)], [(0, 5), (4, 8)], [(0, 5), (60, 65)]])
def test_bubbles_in_disorder_are_refused(rows):
    with pytest.raises(ValueError, match="not in order within a step"):
        BubblePattern(rows, PERIOD)


@pytest.mark.parametrize("period_s", [0.0, -1.0, inf, float("nan")])
def test_a_period_has_a_length(period_s):
    with pytest.raises(ValueError, match="not in order within a step of"):
        BubblePattern([], period_s)


@pytest.mark.parametrize("rows", [[], [(0, PERIOD)], [(0, 5), (5, 8)], [(3, 3)]])
def test_bubbles_may_touch_each_other_and_both_ends_of_the_step(rows):
    assert BubblePattern(rows, PERIOD).capacity_s == sum(end - start for start, end in rows)


def test_searches_begin_in_another_table_each_time(monkeypatch):
    monkeypatch.setattr("weft.inference.placement.bounds.MAX_ROWS", 16)
    placement = PrefillPlacement(PERIOD)
    for worker in range(40):
        placement.set(worker, BubblePattern([(worker, worker + 3)], PERIOD), 0.0)
    orders = [placement._rotated() for _ in range(6)]
    assert all(sorted(map(id, order)) == sorted(map(id, placement._tables)) for order in orders)
    for begun in (orders[:3], orders[3:]):
        assert len({id(order[0]) for order in begun}) == len(placement._tables) == 3


@given(
    tokens=st.integers(1, 400),
    cached=st.integers(0, 100),
    chunk=st.integers(1, 60),
    context_s=st.sampled_from([0.0, 2.0**-12]),
)
def test_the_work_of_a_prompt_is_that_of_its_full_chunks(tokens, cached, chunk, context_s):
    """Chunk by chunk, but for the fixed cost of the first, which is the bubble's."""
    cost = PromptWork(step_s=0.25, token_s=0.125, context_s=context_s, chunk_tokens=chunk, max_tokens=512)
    seconds, context = -0.25, cached
    while context < cached + tokens:
        part = min(chunk, cached + tokens - context)
        seconds += 0.25 + 0.125 * part + context_s * (part * context + part * part / 2)
        context += part
    assert cost.work_s(cached + tokens, cached) == pytest.approx(seconds)
    assert cost.overhead_s == 0.25 + 0.125 + context_s * 512


@given(tokens=st.integers(0, 3000), context=st.integers(0, 9000), gap_s=st.sampled_from([0.0, 0.05, 1.0]))
def test_the_work_of_prompts_is_what_the_cost_model_predicts(tokens, context, gap_s):
    cost = PrefillCost()
    for number in range(TRUSTED):
        cost.observe(100 + number, 50 * number, gap_s, 0.01 + number * 1e-3)
    made = PromptWork.of(cost, gap_s=gap_s, chunk_tokens=77, max_tokens=999)
    assert made.chunk_s(tokens, context) == pytest.approx(cost.predict_s(tokens, context, gap_s), rel=1e-6, abs=1e-9)
    assert (made.chunk_tokens, made.max_tokens) == (77, 999)


def test_many_patterns_are_as_exact_as_few(monkeypatch):
    """More patterns than a table has rows: workers in any table are found, whichever is looked at first."""
    monkeypatch.setattr("weft.inference.placement.bounds.MAX_ROWS", 16)
    patterns = [BubblePattern([(n % 61, n % 61 + 3)], PERIOD, origin_s=float(n % 7)) for n in range(100)]
    placement, free = PrefillPlacement(PERIOD), dict.fromkeys(range(100), 0.0)
    for worker, pattern in enumerate(patterns):
        placement.set(worker, pattern, 0.0)
    for number in range(300):
        now, work = float(number), float(1 + number % 9)
        slot = placement.find(now, work)
        assert slot.end_s == min(patterns[w].end(max(now, free[w]), work) for w in free)
        assert slot.end_s == patterns[slot.worker].end(max(now, free[slot.worker]), work)
        placement.take(slot)
        free[slot.worker] = slot.end_s
    assert len(set(patterns)) > 48
