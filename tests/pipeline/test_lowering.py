"""Tests of the lowering passes: what they add, where, and what they leave alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.cases import schedules
from weft.pipeline.action import COMPUTE, RECEIVES, SENDS, Action, Op, parse_slot, slot_text
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import (
    add_grad_reduction,
    add_optimizer_step,
    add_transfers,
    add_unshard,
    lower,
    open_pairs,
    split_backwards,
)
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate


def texts(schedule):
    return [" ".join(slot_text(slot) for slot in row) for row in schedule.rows]


def compute_rows(schedule):
    return [[slot for slot in row if slot[0].op in COMPUTE] for row in schedule.rows]


def test_1f1b_of_two_ranks():
    assert texts(lower(generate("1f1b", Placement.straight(2), 2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0STEP",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP",
    ]


def test_weights_are_gathered_after_the_step_or_ahead_of_what_their_users_receive():
    plain = lower(generate("1f1b", Placement.straight(2), 2))
    assert add_unshard(plain, zero_stage=0) is plain
    once = add_unshard(plain, zero_stage=1)
    assert texts(once) == [f"{rank}UNSHARD {row}" for rank, row in enumerate(texts(plain))]
    assert add_unshard(once, zero_stage=3) is once
    assert texts(add_unshard(plain, zero_stage=3)) == [
        "0UNSHARD 0F0 0RESHARD 0SEND_F0 0UNSHARD 0F1 0RESHARD 0SEND_F1 "
        "0UNSHARD 0RECV_B0 0B0 0RESHARD 0UNSHARD 0RECV_B1 0B1 0RESHARD 0REDUCE_GRAD 0STEP",
        "1UNSHARD 1RECV_F0 1F0 1RESHARD 1UNSHARD 1B0 1RESHARD 1SEND_B0 "
        "1UNSHARD 1RECV_F1 1F1 1RESHARD 1UNSHARD 1B1 1RESHARD 1SEND_B1 1REDUCE_GRAD 1STEP",
    ]


def test_a_fold_moves_nothing_between_stages_of_one_rank():
    assert texts(lower(generate("zbv", Placement.fold(1), 1))) == [
        "0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD 0STEP"
    ]


def test_transfers_of_a_pair_stand_around_it():
    row = texts(lower(generate("w", Placement.fold(2), 4)))[0]
    assert " 0RECV_B0 (3F2;0B0)OVERLAP_F_B" in row or "3RECV_F2 0RECV_B0 (3F2;0B0)OVERLAP_F_B" in row
    pair = "(0F2;3B0)OVERLAP_F_B"
    assert f"{pair} 0SEND_F2 3SEND_B0" in row


@given(st.sampled_from([lower, add_transfers, add_grad_reduction, add_optimizer_step]), schedules())
def test_a_pass_keeps_compute_and_is_done_once(lowering_pass, schedule):
    lowered = lowering_pass(schedule)
    assert compute_rows(lowered) == compute_rows(schedule)
    assert lowering_pass(lowered) == lowered
    validate(lowered)


@given(schedules())
def test_passes_commute_but_for_the_place_of_sends(schedule):
    one = add_grad_reduction(add_transfers(add_optimizer_step(schedule)))
    other = lower(schedule)
    assert [sorted(map(str, one.actions(rank))) for rank in range(one.num_ranks)] == [
        sorted(map(str, other.actions(rank))) for rank in range(one.num_ranks)
    ]
    validate(one)


@given(schedules())
def test_each_transfer_stands_beside_its_compute(schedule):
    lowered = add_transfers(schedule)
    for row in lowered.rows:
        for index, slot in enumerate(row):
            if slot[0].op in RECEIVES:
                consumer = next(s for s in row[index:] if s[0].op in COMPUTE)
                assert slot[0][1:] in [action[1:] for action in consumer]
            if slot[0].op in SENDS:
                producer = next(s for s in row[index::-1] if s[0].op in COMPUTE)
                assert slot[0][1:] in [action[1:] for action in producer]


@given(schedules())
def test_a_stage_is_reduced_right_after_its_last_weight_gradient(schedule):
    for row in add_grad_reduction(schedule).rows:
        open_stages = {}
        for index, slot in enumerate(row):
            for action in slot:
                if action.op in (Op.W, Op.B):
                    open_stages[action.stage] = index
                if action.op is Op.REDUCE_GRAD:
                    last = open_stages.pop(action.stage)
                    assert all(other[0].op is Op.REDUCE_GRAD for other in row[last + 1 : index])
        assert not open_stages


@given(schedules())
def test_the_step_is_last_and_names_the_lowest_stage(schedule):
    lowered = lower(schedule)
    for rank, row in enumerate(lowered.rows):
        assert row[-1] == (Action(Op.STEP, min(schedule.placement.rank_stages[rank])),)


@given(schedules(kinds=("w", "dualpipev")))
def test_opened_pairs_hold_the_same_actions(schedule):
    opened = open_pairs(schedule)
    assert all(len(slot) == 1 for row in opened.rows for slot in row)
    assert [list(opened.actions(r)) for r in range(opened.num_ranks)] == [
        [action for slot in row for action in reversed(slot)] for row in schedule.rows
    ]
    validate(lower(opened))


@pytest.mark.parametrize("num_microbatches", [1, 4, 5, 12])
def test_opened_w_saves_no_more_than_1f1b(num_microbatches):
    """A chunk of the fold is half a stage, so twice 1F1B's count is the same memory (DHelix section 6.5)."""
    folded = simulate(open_pairs(generate("w", Placement.fold(4), num_microbatches)), CostModel.unit(8))
    straight = simulate(generate("1f1b", Placement.straight(4), num_microbatches), CostModel.unit(4))
    assert max(folded.live_microbatches) <= 2 * max(straight.live_microbatches)


def test_backwards_of_some_stages_are_split_outside_of_pairs():
    row = [parse_slot(text) for text in ("0F0", "0B0", "(0F2;0B1)OVERLAP_F_B", "3B1", "0W5")]
    schedule = Schedule("made up", Placement.fold(1, 4), 3, (tuple(row),))
    split = [[str(action) for action in slot] for slot in split_backwards(schedule, {0}).rows[0]]
    assert split == [["0F0"], ["0I0"], ["0W0"], ["0F2", "0B1"], ["3B1"], ["0W5"]]
    opened = [[str(action) for action in slot] for slot in open_pairs(schedule).rows[0]]
    assert opened == [["0F0"], ["0B0"], ["0B1"], ["0F2"], ["3B1"], ["0W5"]]
    assert open_pairs(schedule, keep=lambda one, other: (str(one), str(other)) == ("0F2", "0B1")) == schedule
