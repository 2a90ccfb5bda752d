"""A bound is never above what it bounds, and where a step of the table holds one edge of a bubble it is close to it."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inference.placement.bounds import PlacementBounds
from weft.inference.placement.bubble_pattern import BubblePattern

PERIOD_S = 64.0
STEP_S, CELL = PERIOD_S / 512, 1 / 2048
"""The table's resolution: of a period, and of a pattern's capacity."""


@st.composite
def patterns(draw):
    """Bubbles of any length, many of them within one step of the table, or few and far from each other."""
    gaps = draw(st.lists(st.floats(0.01, 9.0), min_size=2, max_size=12))
    edges = [sum(gaps[: n + 1]) for n in range(len(gaps) // 2 * 2)]
    scale = min(1.0, PERIOD_S / edges[-1])
    edges = [edge * scale for edge in edges]
    rows = list(zip(edges[::2], edges[1::2], strict=True))
    return BubblePattern(
        rows, PERIOD_S, origin_s=draw(st.floats(0.0, 64.0)), overhead_s=draw(st.sampled_from([0.0, 0.02]))
    )


@settings(deadline=None, max_examples=60)
@given(
    found=patterns(),
    before=st.floats(0.0, 100.0),
    asked=st.lists(st.tuples(st.floats(0.0, 40.0), st.floats(0.01, 999.0)), min_size=1, max_size=8),
)
def test_no_work_ends_before_its_bound_and_little_later(found, before, asked):
    if found.capacity_s < 0.5:
        return
    bounds, now_s = PlacementBounds(PERIOD_S), 0.0
    row = bounds.add(found)
    bounds.at(row, found.position(before))
    for gap_s, work_s in asked:
        now_s += gap_s
        end_s = found.end(max(now_s, before), work_s)
        reach_s, from_s = bounds.reach_s(now_s, work_s)
        bound_s = reach_s.item(row) + from_s
        assert bound_s <= end_s + 1e-6
        assert all(reach_s.item(other) > 2**39 for other in range(len(reach_s)) if other != row), "nobody is there"
        # Losses at edges: steps and cells, and the distance between the bubbles where a cell ends one.
        gaps_s = [b - a for a, b in zip(found._ends, found._starts[1:], strict=False)]
        longest_s = max([*gaps_s, PERIOD_S - found._ends[-1] + found._starts[0]])
        assert end_s - bound_s <= longest_s + found.overhead_s + 4 * STEP_S + found.capacity_s * CELL
    bounds.drop(row)
    assert bounds.reach_s(now_s, 1.0)[0].item(row) > 2**39 and inf > bounds.reach_s(now_s, 1.0)[1]


@settings(deadline=None, max_examples=60)
@given(
    begin_s=st.floats(1.0, 30.0),
    length_s=st.floats(1.0, 30.0),
    now_s=st.floats(0.0, 200.0),
    share=st.floats(0.01, 0.9),
)
def test_of_one_bubble_the_bound_is_its_end_to_a_millionth(begin_s, length_s, now_s, share):
    """Away from the cell in which it ends, whatever step it begins in."""
    found = BubblePattern([(begin_s, begin_s + length_s)], PERIOD_S)
    phase_s, work_s = now_s % PERIOD_S, share * length_s
    room_s = begin_s + length_s - max(begin_s, phase_s)
    if abs(phase_s - begin_s - length_s) < 2 * STEP_S or (room_s > 0 and abs(room_s - work_s) < 2 * length_s * CELL):
        return
    bounds = PlacementBounds(PERIOD_S)
    row = bounds.add(found)
    bounds.at(row, found.position(0.0))
    reach_s, from_s = bounds.reach_s(now_s, work_s)
    end_s = found.end(now_s, work_s)
    assert end_s - 1e-3 <= reach_s.item(row) + from_s <= end_s + 1e-6
