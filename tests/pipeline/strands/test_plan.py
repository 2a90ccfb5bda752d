"""Segment plans as values: text, JSON, what is refused, and how long they take."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from tests.pipeline.strands.orders import backward_then_forward, round_robin
from tests.pipeline.strands.pairs import BETWEEN, INSIDE, llama_layer, pairs, tables
from weft.pipeline.strands.overlap import OverlapTable, overlap_effectiveness
from weft.pipeline.strands.plan import SegmentPlan, Step
from weft.pipeline.strands.segments import Kind, Segment, Strand, StrandPair, WeightGradient

ONE = StrandPair(
    Strand((Segment(1.0, INSIDE, 2.0), Segment(1.0))),
    Strand((Segment(2.0, INSIDE, 1.0), Segment(2.0))),
    (WeightGradient(0, 1.5),),
)


@given(steps=st.lists(st.sampled_from(list(Step))))
def test_the_text_gives_the_plan_back(steps):
    plan = SegmentPlan(tuple(steps))
    assert SegmentPlan.of(str(plan)) == plan


@pytest.mark.parametrize("text", ["X", "0F", "F2", "-1F", "9999999F"])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="is no run of steps"):
        SegmentPlan.of(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("W 2F 2B", "step 0 is weight gradient 0"),
        ("2F B W", "1 steps B, where the pair has 2"),
        ("3F 2B W", "3 steps F, where the pair has 2"),
        ("2F 2B", "0 steps W, where the pair has 1"),
    ],
)
def test_a_plan_that_does_not_run_the_pair_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        SegmentPlan.of(text).check(ONE)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        # B 0-2, its collective 2-3 during W 2-3.5; B 3.5-5.5; F 5.5-6.5, collective to 8.5, F to 9.5.
        ("B W B 2F", 9.5),
        # F 0-1, collective 1-3 during B 1-3; B's collective 3-4 during F 3-4; W 4-5.5; B 5.5-7.5.
        ("F B F W B", 7.5),
        # One link: B's collective waits for F's: F 0-1, collective 1-3; B 1-3, 3-4.
        ("F B B F W", 8.5),
    ],
)
def test_durations_that_can_be_counted_by_hand(text, seconds):
    plan = SegmentPlan.of(text)
    plan.check(ONE)
    assert plan.seconds(ONE, OverlapTable()) == approx(seconds)


def test_collectives_of_one_link_class_queue_and_of_two_do_not():
    same = StrandPair(Strand((Segment(0.0, INSIDE, 3.0),)), Strand((Segment(0.0, INSIDE, 3.0),)))
    other = StrandPair(Strand((Segment(0.0, INSIDE, 3.0),)), Strand((Segment(0.0, BETWEEN, 3.0),)))
    plan = SegmentPlan.of("F B")
    assert plan.seconds(same, OverlapTable()) == approx(6.0)
    assert plan.seconds(other, OverlapTable()) == approx(3.0)
    assert plan.seconds(other, OverlapTable(links=0.5)) == approx(4.5)


@given(oef=st.floats(0, 1), compute=st.floats(0.1, 5), comm=st.floats(0.1, 5))
def test_two_operators_overlap_as_the_factor_says(oef, compute, comm):
    pair = StrandPair(Strand((Segment(0.0, INSIDE, comm),)), Strand((Segment(compute),)))
    together = SegmentPlan.of("F B").seconds(pair, OverlapTable(compute={(Kind.gemm, INSIDE): oef}, default=0.3))
    assert overlap_effectiveness(compute, comm, together) == approx(oef, abs=1e-6)


@given(pair=pairs(most=4, most_weights=3), table=tables)
def test_better_overlap_never_makes_an_order_slower(pair, table):
    for order in (backward_then_forward(pair), round_robin(pair)):
        assert order.seconds(pair, OverlapTable()) <= order.seconds(pair, table) + 1e-9
        assert order.seconds(pair, table) <= pair.sequential_s * 2 + 1e-9


def test_without_overlap_nothing_is_hidden():
    pair = llama_layer()
    assert round_robin(pair).hidden(pair, OverlapTable(default=0.0, links=0.0)) == approx(0.0, abs=1e-9)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_factors_outside_of_their_range_are_refused(value):
    with pytest.raises(ValueError, match=r"overlap.default=.*between 0 and 1"):
        OverlapTable(default=value)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match=r"segment.compute_s"):
        Segment(value)
    with pytest.raises(ValueError, match=r"segment.comm_s"):
        Segment(1.0, INSIDE, value)


def test_weight_gradients_of_no_segment_are_refused():
    with pytest.raises(ValueError, match="weights: after segments"):
        StrandPair(Strand((Segment(1.0),)), Strand((Segment(1.0),)), (WeightGradient(1, 1.0),))
