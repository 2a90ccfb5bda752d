"""The simulator against bounds, formulas and cases small enough to work out by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.cases import costs_for, maybe_lowered, schedules
from tests.pipeline.pair_costs import scaled
from weft.pipeline.action import COMPUTE, SENDS, Action, Op
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.lowering import add_transfers, lower
from weft.pipeline.memory import held_along
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule, ScheduleError
from weft.pipeline.simulation import simulate


def critical_path_s(schedule, costs):
    """A micro-batch alone, down and up again, with its transfers: no step can be shorter."""
    placement = schedule.placement
    total = sum(cost.forward_s + cost.input_s for cost in costs.stages)
    for stage in range(placement.num_stages - 1):
        here, there = placement.stage_ranks[stage], placement.stage_ranks[stage + 1]
        if here != there:
            sites = placement.rank_sites[here], placement.rank_sites[there]
            for link in (costs.link(*sites), costs.link(*sites[::-1])):
                total += link.latency_s + link.occupancy_s(costs.stages[stage].output_bytes)
    return total


@given(st.data())
def test_no_step_beats_the_critical_path_or_the_busiest_rank(data):
    schedule = data.draw(maybe_lowered)
    costs = data.draw(costs_for(schedule.placement.num_stages))
    timeline = simulate(schedule, costs)
    # Pairs may shorten compute; nothing shortens a lone micro-batch by more than their scale.
    assert timeline.step_s >= critical_path_s(schedule, costs) * costs.least_pair_scale(range(len(costs.stages)))
    assert timeline.step_s >= max(timeline.busy_s)
    unpaired = replace(costs, pairs=None)
    assert simulate(schedule, unpaired).step_s >= critical_path_s(schedule, unpaired)


@given(st.data())
def test_times_follow_rows_dependencies_and_links(data):
    schedule = data.draw(maybe_lowered)
    costs = data.draw(costs_for(schedule.placement.num_stages))
    timeline = simulate(schedule, costs)
    ranks, sites = schedule.placement.stage_ranks, schedule.placement.rank_sites
    ended = {}
    uplinks, held = {}, {}
    for span in timeline.spans:
        if span.lane != "send":
            ended.update(dict.fromkeys(span.slot, span.end_s))
        if span.lane == "send":
            held.setdefault(span.rank, []).append((span.start_s, span.end_s))
        elif span.slot[0].op in SENDS:
            peer = int(span.lane[2:])
            link = costs.link(sites[span.rank], sites[peer])
            queue = "wan" if sites[span.rank] != sites[peer] else span.lane[0]
            leaves = span.end_s - link.latency_s
            if leaves > span.start_s:
                uplinks.setdefault((span.rank, queue), []).append((span.start_s, leaves))
    for rank, lane in enumerate(timeline.compute):
        order = [span.slot for span in lane if span.slot[0].op in COMPUTE]
        assert order == [slot for slot in schedule.rows[rank] if slot[0].op in COMPUTE]
        busy = sorted([*((span.start_s, span.end_s) for span in lane), *held.get(rank, [])])
        assert all(before[1] <= after[0] for before, after in pairwise(busy))
        for span in lane:
            for action in span.slot:
                if action.op is Op.F and action.stage > 0:
                    assert ended[Action(Op.F, action.stage - 1, action.microbatch)] <= span.start_s
                    send = Action(Op.SEND_F, action.stage - 1, action.microbatch)
                    assert ended.get(send, 0.0) <= span.start_s
                if action.op in (Op.B, Op.I) and action.stage + 1 < len(ranks):
                    assert ended.get(Action(Op.SEND_B, action.stage + 1, action.microbatch), 0.0) <= span.start_s
    for intervals in uplinks.values():
        intervals.sort()
        # When a transfer left was found by a subtraction, which rounds.
        rounding_s = 1e-12 * timeline.step_s
        assert all(before[1] <= after[0] + rounding_s for before, after in pairwise(intervals))


@given(st.data())
def test_transfers_are_implied_in_a_compute_only_schedule(data):
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule.placement.num_stages))
    assert simulate(schedule, costs) == simulate(add_transfers(schedule), costs)


@given(st.data())
def test_free_links_make_no_difference_between_lowered_and_not(data):
    schedule = data.draw(schedules())
    costs = CostModel.unit(schedule.placement.num_stages)
    assert simulate(schedule, costs).step_s == simulate(lower(schedule), costs).step_s


@given(st.data())
def test_slower_links_never_shorten_a_step(data):
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule.placement.num_stages))
    free = replace(costs, local=LinkCost(), wan=LinkCost(), wan_links=())
    assert simulate(schedule, free).step_s <= simulate(schedule, costs).step_s


@given(maybe_lowered)
def test_busy_time_and_bubbles_make_up_the_step(schedule):
    timeline = simulate(schedule, CostModel.unit(schedule.placement.num_stages))
    work = 3 * schedule.num_microbatches * len(schedule.placement.legs)
    for rank in range(schedule.num_ranks):
        bubbles = timeline.bubbles(rank)
        assert timeline.busy_s[rank] == work
        assert sum(end_s - start_s for start_s, end_s in bubbles) + work == timeline.step_s
    assert timeline.bubble_share == pytest.approx(1 - work / timeline.step_s)


@given(maybe_lowered)
def test_all_activations_are_freed_in_the_end(schedule):
    costs = CostModel.unit(schedule.placement.num_stages)
    for row in schedule.rows:
        *_, last = held_along((*row, (Action(Op.STEP, 0),)), costs)
        assert last == (0, 0)


def two_ranks(*rows, num_microbatches, sites=(1, 1)):
    parsed = tuple(tuple((Action.parse(text),) for text in row.split()) for row in rows)
    return Schedule("by hand", Placement.straight(2, sites), num_microbatches, parsed)


def costs_of_two(**link):
    one = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0, output_bytes=1.0)
    return CostModel(stages=(one, one), wan=LinkCost(**link))


def spans_of(timeline, lane):
    return [(str(span.slot[0]), span.start_s, span.end_s) for span in timeline.spans if span.lane == lane]


def test_a_transfer_occupies_its_link_and_then_travels():
    schedule = two_ranks("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2)
    timeline = simulate(schedule, costs_of_two(latency_s=5.0, bandwidth_bps=4.0))  # 8 bits at 4 bit/s: 2 s
    assert spans_of(timeline, "F>1") == [("0SEND_F0", 1.0, 8.0), ("0SEND_F1", 3.0, 10.0)]
    assert [(span.start_s, span.end_s) for span in timeline.compute[1]] == [(8, 9), (10, 11), (11, 13), (13, 15)]
    assert spans_of(timeline, "B>0") == [("1SEND_B0", 13.0, 20.0), ("1SEND_B1", 15.0, 22.0)]
    assert timeline.step_s == 24.0


def test_sharing_divides_the_occupancy_but_not_the_latency():
    schedule = two_ranks("0F0 0B0", "1F0 1B0", num_microbatches=1)
    alone = simulate(schedule, costs_of_two(latency_s=5.0, bandwidth_bps=4.0))
    shared = simulate(schedule, costs_of_two(latency_s=5.0, bandwidth_bps=4.0, sharing=2))
    assert alone.step_s - shared.step_s == 2 * (2.0 - 1.0)


@pytest.mark.parametrize(("sites", "leaves_s", "step_s"), [((1, 1, 1), 15.0, 28.0), ((3,), 14.0, 27.0)])
def test_only_transfers_between_sites_share_a_ranks_uplink(sites, leaves_s, step_s):
    """The middle rank's second activation is ready at 14 s; its gradient is on its way from 13 to 15 s."""
    texts = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2B0 2F1 2B1")
    rows = tuple(tuple((Action.parse(text),) for text in row.split()) for row in texts)
    costs = CostModel.unit(3, local=LinkCost(bandwidth_bps=4.0), wan=LinkCost(bandwidth_bps=4.0))
    timeline = simulate(Schedule("by hand", Placement.straight(3, sites), 2, rows), costs)
    assert ("1SEND_B0", 13.0, 15.0) in spans_of(timeline, "B>0")
    assert ("1SEND_F1", leaves_s, leaves_s + 2) in spans_of(timeline, "F>2")
    assert timeline.step_s == step_s


def test_a_pair_is_atomic_and_scaled():
    f, b = Action(Op.F, 0, 1), Action(Op.B, 0, 0)
    placement = Placement.straight(1)
    schedule = Schedule("pair", placement, 2, (((Action(Op.F, 0, 0),), (f, b), (Action(Op.B, 0, 1),)),))
    timeline = simulate(schedule, replace(CostModel.unit(1), pairs=scaled(0.75)))
    assert [(span.start_s, span.end_s) for span in timeline.spans] == [(0, 1), (1, 3.25), (3.25, 5.25)]
    assert timeline.live_microbatches == (2,)


def test_weight_gradients_keep_what_they_need():
    row = tuple((Action.parse(text),) for text in ("0F0", "0I0", "0F1", "0W0", "0I1", "0W1"))
    schedule = Schedule("split", Placement.straight(1), 2, (row,))
    one = StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=10, weight_saved_bytes=3)
    assert [held.num_bytes for held in held_along(row, CostModel(stages=(one,)))] == [10, 13, 13, 13, 13, 3]
    timeline = simulate(schedule, CostModel(stages=(one,)))
    assert timeline.peak_bytes == (13,)
    assert timeline.live_microbatches == (1,)


def test_reduction_runs_beside_compute_and_the_step_waits_for_it():
    one = StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=1, reduce_s=10, step_s=2)
    placement = Placement.interleaved(1, 2)
    timeline = simulate(lower(generate("gpipe", placement, 1)), CostModel(stages=(one, one)))
    assert spans_of(timeline, "reduce") == [("1REDUCE_GRAD", 4.0, 14.0), ("0REDUCE_GRAD", 14.0, 24.0)]
    assert spans_of(timeline, "compute")[-1] == ("0STEP", 24.0, 28.0)
    assert timeline.step_s == 28.0


def test_particular_links_win_over_the_common_one():
    schedule = generate("1f1b", Placement.straight(3, (1, 1, 1)), 1)
    slow = replace(CostModel.unit(3), wan_links=(((0, 1), LinkCost(latency_s=7.0)),))
    assert simulate(schedule, slow).step_s == 9 + 7


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match=r"costs.stages: costs of 3 virtual stages, schedule '1f1b' has 4"):
        simulate(generate("1f1b", Placement.straight(4), 8), CostModel.unit(3))


def test_a_deadlock_is_an_error():
    schedule = two_ranks("0B0 0F0", "1F0 1B0", num_microbatches=1)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(schedule, CostModel.unit(2))


def test_what_takes_no_time_has_no_span():
    """Free links, reductions and optimisers are in the schedule, and no rank waits for them."""
    schedule = lower(generate("1f1b", Placement.straight(3, (1, 2)), 4))
    spans = simulate(schedule, CostModel.unit(3)).spans
    assert {span.lane for span in spans} == {"compute"} and all(span.end_s > span.start_s for span in spans)
    assert len(spans) == 3 * 4 * 2
