"""Timelines: lanes by their text, busy time, and bubbles."""

from weft.pipeline.action import Action
from weft.pipeline.timeline import COMPUTE_LANE, REDUCE_LANE, SEND_LANE, Lane, Span, Timeline


def timeline(*spans, num_ranks=2):
    made = tuple(Span(rank, lane, (Action.parse("0F0"),), start_s, end_s) for rank, lane, start_s, end_s in spans)
    return Timeline("made up", num_ranks, made, (0.0,) * num_ranks, (0,) * num_ranks)


def test_transfers_say_to_whom():
    lane = Lane.transfer("B", 13)
    assert lane == "B>13" and lane.peer == 13
    assert Lane("F>7").counted_from(5) == "F>2" and SEND_LANE.counted_from(5) is SEND_LANE
    assert COMPUTE_LANE.peer is SEND_LANE.peer is REDUCE_LANE.peer is None


def test_time_without_compute_is_idle_whatever_else_goes_on():
    found = timeline(
        (0, COMPUTE_LANE, 1.0, 3.0),
        (0, SEND_LANE, 3.0, 5.0),
        (1, COMPUTE_LANE, 0.0, 2.0),
        (1, COMPUTE_LANE, 2.5, 6.0),
        (0, REDUCE_LANE, 6.0, 8.0),
    )
    assert found.step_s == 8.0 and found.busy_s == (2.0, 5.5)
    assert found.bubble_share == 1 - 7.5 / 16
    assert found.bubbles(0) == ((0.0, 1.0), (3.0, 8.0))
    assert found.bubbles(1) == ((2.0, 2.5), (6.0, 8.0))


def test_an_empty_step_has_no_bubbles():
    empty = timeline()
    assert empty.step_s == empty.bubble_share == 0.0 and empty.bubbles(0) == ()
    assert timeline(num_ranks=0).bubble_share == 0.0
