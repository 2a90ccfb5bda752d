"""The online twin against the simulator: with a real rank that does what the simulator says, all is as simulated."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.random_schedules import random_placement, random_schedule
from weft.pipeline.action import SENDS, Action, Op
from weft.pipeline.cell import side_by_side
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.lowering import lower
from weft.pipeline.order import execution_order
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import SimulatedStep, simulate
from weft.recipes.emulation.twin import OnlineTwin, simulated_s

START_S = 100.0


def simulated(schedule, costs):
    """When each rank posts its sends, when each fact is there, and when each rank has ended."""
    step, posted = SimulatedStep(schedule, costs), {}
    for visit in execution_order(schedule):
        if visit.slot[0].op in SENDS:
            posted[visit.slot[0]] = step.could_start_s(visit)
        step.step(visit)
    return posted, step._fact_s, step._rank_free_s


def some_costs(rng, num_stages):
    stages = tuple(
        StageCost(
            **{name: rng.choice([0.5, 1.0, 2.5]) for name in ("forward_s", "input_s", "weight_s")},
            activation_bytes=1.0,
            output_bytes=1.0,
            reduce_s=rng.choice([0.0, 2.0]),
            step_s=rng.choice([0.0, 0.5]),
            send_s=rng.choice([0.0, 0.25]),
        )
        for _ in range(num_stages)
    )
    return CostModel(stages=stages, local=LinkCost(bandwidth_bps=16.0), wan=LinkCost(latency_s=3.0, bandwidth_bps=4.0))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 5))
def test_the_others_do_what_the_simulator_says(seed, num_ranks, num_microbatches):
    rng = random.Random(seed)
    placement = random_placement(rng, num_ranks)
    schedule = lower(random_schedule(rng, placement, num_microbatches))
    costs = some_costs(rng, placement.num_stages)
    posted, facts, ended = simulated(schedule, costs)
    for real in range(num_ranks):
        twin = OnlineTwin(schedule, costs, real)
        twin.begin(START_S)
        for slot in schedule.rows[real]:
            for action in slot:
                if action.op in SENDS:
                    twin.sent(action, START_S + posted[action])
                elif action.op in (Op.RECV_F, Op.RECV_B):
                    send = Action(
                        Op.SEND_F if action.op is Op.RECV_F else Op.SEND_B,
                        action.stage + (-1 if action.op is Op.RECV_F else 1),
                        action.microbatch,
                    )
                    assert twin.arrival_s(send) == pytest.approx(START_S + facts[send])
        for rank in range(num_ranks):
            if rank != real:
                assert twin.ended_s(rank) == pytest.approx(START_S + ended[rank])
                assert twin.reached_s(rank) <= twin.ended_s(rank)


def straight(num_ranks=3, num_microbatches=2):
    from weft.pipeline.generators import generate

    return lower(generate("1f1b", Placement.straight(num_ranks), num_microbatches))


def test_the_next_step_begins_where_the_others_have_ended():
    schedule, costs = straight(2, 1), CostModel.unit(2)
    twin = OnlineTwin(schedule, costs, 1)
    twin.begin(10.0)
    assert twin.arrival_s(Action(Op.SEND_F, 0, 0)) == 11.0
    twin.sent(Action(Op.SEND_B, 1, 0), 20.0)
    assert twin.ended_s(0) == 22.0
    twin.begin(20.0)
    assert twin.arrival_s(Action(Op.SEND_F, 0, 0)) == 23.0
    twin.sent(Action(Op.SEND_B, 1, 0), 30.0)
    twin.hold(0, 50.0)
    twin.begin(50.0)
    assert twin.arrival_s(Action(Op.SEND_F, 0, 0)) == 51.0


def test_a_message_without_receiver_or_sender_is_named():
    twin = OnlineTwin(straight(), CostModel.unit(3), 1)
    twin.begin(0.0)
    with pytest.raises(LookupError, match="no rank of schedule '1f1b' waits for 1SEND_F7 of rank 1"):
        twin.sent(Action(Op.SEND_F, 1, 7), 0.0)
    with pytest.raises(LookupError, match="no rank of schedule '1f1b' sends 0SEND_F7"):
        twin.arrival_s(Action(Op.SEND_F, 0, 7))
    with pytest.raises(LookupError, match="2SEND_B0 of rank 2 never comes: its 2RECV_F0 waits for 1SEND_F0"):
        twin.arrival_s(Action(Op.SEND_B, 2, 0))


class Late:
    """Rank 0 computes at half its speed, and every message is a second late."""

    def compute_s(self, rank, action, seconds):
        return seconds * (2 if rank == 0 else 1)

    def late_s(self, send, sender, receiver, num_bytes):
        assert (sender, receiver, num_bytes) == (0, 1, 1.0)
        return 1.0


def test_a_pace_changes_what_the_others_take():
    twin = OnlineTwin(straight(2, 1), CostModel.unit(2), 1, Late())
    twin.begin(0.0)
    assert twin.arrival_s(Action(Op.SEND_F, 0, 0)) == 3.0


class Recorded:
    """All computations take twice as long, and the calls are recorded."""

    def __init__(self):
        self.asked = set()

    def compute_s(self, rank, action, seconds):
        self.asked.add((rank, action))
        return 2 * seconds

    def late_s(self, send, sender, receiver, num_bytes):
        return 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5))
def test_a_pace_is_simulated_as_other_costs_of_computations_are(seed, num_ranks, num_microbatches):
    rng = random.Random(seed)
    placement = random_placement(rng, num_ranks)
    schedule, costs = lower(random_schedule(rng, placement, num_microbatches)), some_costs(rng, placement.num_stages)
    computations = ("forward_s", "input_s", "weight_s", "step_s")
    slower = [replace(each, **{name: 2 * getattr(each, name) for name in computations}) for each in costs.stages]
    expected = simulate(schedule, replace(costs, stages=tuple(slower))).step_s
    assert simulated_s(schedule, costs, Recorded()) == pytest.approx(expected)


def test_computations_of_each_pipeline_of_a_cell_have_the_names_of_a_single_pipeline():
    pace = Recorded()
    simulated_s(side_by_side(straight(2, 1), 2), CostModel.unit(4), pace)
    own = {(0, "0F0"), (0, "0B0"), (0, "0STEP"), (1, "1F0"), (1, "1B0"), (1, "1STEP")}
    assert pace.asked == own | {(rank + 2, action) for rank, action in own}


def test_a_paced_optimiser_step_is_known():
    twin = OnlineTwin(
        straight(2, 1), CostModel(stages=(replace(CostModel.unit(1).stages[0], step_s=0.5),) * 2), 1, Late()
    )
    twin.begin(0.0)
    assert twin.step_s(0) == 1.0


def test_costs_may_change_between_steps():
    twin = OnlineTwin(straight(2, 1), CostModel.unit(2), 1)
    twin.costs = replace(twin.costs, stages=tuple(replace(stage, forward_s=5.0) for stage in twin.costs.stages))
    twin.begin(0.0)
    assert twin.arrival_s(Action(Op.SEND_F, 0, 0)) == 5.0


def ended_once(twin, sent_s=20.0):
    """The real rank 1 of two has sent its gradient back."""
    twin.begin(10.0)
    twin.sent(Action(Op.SEND_B, 1, 0), sent_s)


def test_others_begin_a_pause_after_they_have_ended_and_hold_only_puts_off():
    twin = OnlineTwin(straight(2, 1), CostModel.unit(2), 1)
    ended_once(twin)
    twin.hold(0, 5.0)
    assert twin.ended_s(0) == 22.0, "it had not ended before"
    twin.begin(21.0, pause_s=3.0)
    assert twin.arrival_s(Action(Op.SEND_F, 0, 0)) == 22.0 + 3.0 + 1.0


def test_the_end_of_a_row_is_reached_before_the_optimiser_steps():
    stage = replace(CostModel.unit(1).stages[0], reduce_s=4.0, step_s=0.5)
    twin = OnlineTwin(straight(2, 1), CostModel(stages=(stage, stage)), 1)
    ended_once(twin)
    assert (twin.reached_s(0), twin.ended_s(0)) == (22.0 + 4.0, 26.5)


def test_spans_are_those_of_the_others_on_the_callers_clock():
    schedule, costs = straight(2, 1), CostModel.unit(2)
    twin = OnlineTwin(schedule, costs, 1)
    ended_once(twin)
    computed = [
        (span.rank, str(span.slot[0]), span.start_s, span.end_s) for span in twin.spans() if span.lane == "compute"
    ]
    assert computed == [(0, "0F0", 10.0, 11.0), (0, "0B0", 20.0, 22.0)]
    assert {span.rank for span in twin.spans()} == {0}
    assert twin._fronts[0] == len(schedule.rows[0])


def test_a_ranks_own_message_does_not_arrive():
    twin = OnlineTwin(straight(2, 1), CostModel.unit(2), 1)
    twin.begin(0.0)
    with pytest.raises(LookupError, match="1SEND_B0 is this rank's own"):
        twin.arrival_s(Action(Op.SEND_B, 1, 0))
    with pytest.raises(LookupError, match="waits for 0SEND_F0 of rank 1"):
        twin.sent(Action(Op.SEND_F, 0, 0), 0.0)


def test_messages_of_both_directions_are_late_by_their_own_bytes():
    asked = []

    class Slow:
        def compute_s(self, rank, action, seconds):
            asked.append((rank, action))
            return seconds

        def late_s(self, send, sender, receiver, num_bytes):
            asked.append((str(send), sender, receiver, num_bytes))
            return 0.5

    one, *rest = CostModel.unit(3).stages
    costs = CostModel(stages=(replace(one, output_bytes=7.0), *(replace(stage, output_bytes=9.0) for stage in rest)))
    twin = OnlineTwin(straight(3, 1), costs, 0, Slow())
    twin.begin(0.0)
    twin.sent(Action(Op.SEND_F, 0, 0), 1.0)
    # There at 1.5, forward to 2.5 and 3.0, forward and backward to 6.0 and 6.5, backward to 8.5.
    assert twin.arrival_s(Action(Op.SEND_B, 1, 0)) == 9.0
    messages = [call for call in asked if len(call) == 4]
    assert messages == [
        ("0SEND_F0", 0, 1, 7.0),
        ("1SEND_F0", 1, 2, 9.0),
        ("2SEND_B0", 2, 1, 9.0),
        ("1SEND_B0", 1, 0, 7.0),
    ]
    assert {action for _, action in (call for call in asked if len(call) == 2)} >= {"1F0", "2F0", "2B0", "1B0"}
    assert not any("SEND" in call[1] for call in asked if len(call) == 2), "of transfers only the lateness is asked"
