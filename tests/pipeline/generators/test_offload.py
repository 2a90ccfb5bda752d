"""Offloads are inserted under a cap, simulated on lanes of their own, and refused where they cannot suffice."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.cases import schedules
from weft.pipeline.action import COMPUTE, HOST_COPIES, Action, Op
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.generators.offload import add_offloads
from weft.pipeline.lowering import lower, open_pairs
from weft.pipeline.memory import held_along, peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.pipeline.timeline import OFFLOAD_LANE, RELOAD_LANE
from weft.pipeline.validation import validate

TWO = Placement.straight(2)
STAGE = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=10.0, weight_saved_bytes=4.0)
HOST = LinkCost(bandwidth_bps=80.0)
"""A copy of 10 bytes takes a second."""


def costs_of(num_stages, host=HOST):
    return CostModel(stages=(STAGE,) * num_stages, host=host)


def copies(row):
    return [str(slot[0]) for slot in row if slot[0].op in HOST_COPIES]


@given(st.data())
def test_offloads_keep_any_schedule_under_any_cap_or_name_what_is_missing(data):
    schedule = open_pairs(data.draw(schedules()))
    costs = costs_of(schedule.placement.num_stages)
    cap = data.draw(st.integers(10, 60))
    try:
        offloaded = add_offloads(schedule, costs, cap)
    except ValueError as error:
        assert f"pipeline.memory_cap_bytes={cap}: rank " in str(error) and "raise the cap to that" in str(error)
        return
    validate(lower(offloaded), costs=costs, memory_cap_bytes=cap)
    computed = [[slot for slot in row if slot[0].op in COMPUTE] for row in offloaded.rows]
    assert computed == [list(row) for row in schedule.rows], "the order of compute stays"
    assert (offloaded.rows == schedule.rows) == (peak_bytes(schedule, costs) <= cap)


def test_the_activation_whose_backward_is_farthest_away_goes():
    schedule = generate("gpipe", TWO, 3)
    offloaded = add_offloads(schedule, costs_of(2), 20)
    assert copies(offloaded.rows[0]) == ["0OFFLOAD1", "0RELOAD1"]
    assert max(held.num_bytes for held in held_along(offloaded.rows[0], costs_of(2))) == 20
    assert peak_bytes(schedule, costs_of(2)) == 30


def test_a_cap_below_one_microbatch_is_refused_with_its_value_and_a_remedy():
    with pytest.raises(ValueError, match=r"memory_cap_bytes=9: rank 0 needs 10 bytes for 0F0 alone, .* raise the cap"):
        add_offloads(generate("1f1b", TWO, 2), costs_of(2), 9)


def test_copies_take_turns_on_one_lane_in_each_direction_and_delay_what_waits():
    costs = costs_of(2)
    offloaded = add_offloads(generate("gpipe", TWO, 4), costs, 20)
    timelines = {speed: simulate(offloaded, costs_of(2, LinkCost(bandwidth_bps=speed))) for speed in (8.0, 80.0, 1e9)}
    for rank, lane in product(range(2), (OFFLOAD_LANE, RELOAD_LANE)):
        spans = [span for span in timelines[80.0].spans if (span.rank, span.lane) == (rank, lane)]
        assert len(spans) == 2 and all(span.end_s - span.start_s == 1.0 for span in spans)
        assert all(one.end_s <= other.start_s for one, other in pairwise(spans))
    steps = [timeline.step_s for timeline in timelines.values()]
    assert steps[0] > steps[1] >= steps[2] == pytest.approx(simulate(generate("gpipe", TWO, 4), costs).step_s)


def test_a_backward_waits_for_its_copy_back():
    row = "0F0 0OFFLOAD0 0RELOAD0 0B0"
    schedule = generate("gpipe", Placement.straight(1), 1).with_rows([[(Action.parse(a),) for a in row.split()]])
    costs = costs_of(1)
    validate(schedule, costs=costs, memory_cap_bytes=10)
    # The forward, the copy to the host, the copy back, and the backward, each after the other.
    assert simulate(schedule, costs).step_s == 1 + 1 + 1 + 2
    assert [held.num_bytes for held in held_along(schedule.rows[0], costs)] == [10, 10, 10, 10]


def test_the_input_of_a_stage_stays_on_the_device():
    sent = replace(STAGE, output_bytes=3.0)
    costs = CostModel(stages=(sent, STAGE), host=HOST)
    assert [costs.offload_bytes(stage) for stage in (0, 1)] == [10, 7]
    assert Op.OFFLOAD in add_offloads(generate("gpipe", TWO, 3), costs, 24).ops
