"""The validator rejects what cannot run, and marks the cell."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.pipeline.cases import maybe_lowered, schedules
from weft.pipeline.action import Action, Op, parse_slot
from weft.pipeline.costs import CostModel
from weft.pipeline.dependencies import establishes
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule, ScheduleError
from weft.pipeline.validation import validate


def by_hand(placement, num_microbatches, *rows):
    return Schedule("by hand", placement, num_microbatches, tuple(tuple(map(parse_slot, r.split())) for r in rows))


TWO = Placement.straight(2)
ONE = Placement.straight(1)


@pytest.mark.parametrize(
    ("schedule", "message", "cell"),
    [
        (by_hand(TWO, 1, "0F0 0B0", "1F0"), r"1I0 \(or 1B0\) is missing", "1F0  (end)"),
        (by_hand(TWO, 1, "0B0", "1F0 1B0"), r"0F0 is missing", "0B0  (end)"),
        (by_hand(ONE, 1, "0F0 0I0"), r"0W0 \(or 0B0\) is missing", "0I0  (end)"),
        (by_hand(ONE, 1, "0F0 0B0 0W0"), r"0W0 is redundant with 0B0, which includes it", "0W0"),
        (by_hand(ONE, 1, "0F0 0F0 0B0"), r"0F0 stands twice", "0F0"),
        (by_hand(TWO, 1, "1F0 0B0", "0F0 1B0"), r"1F0 stands on rank 0, its stage is on rank 1", "1F0"),
        (by_hand(ONE, 1, "0F0 0B0 3F0"), r"3F0: there are 1 virtual stages", "3F0"),
        (by_hand(ONE, 1, "0F0 0B0 0F1"), r"0F1: there are 1 micro-batches", "0F1"),
        (by_hand(ONE, 1, "0F0 0W0 0I0"), r"deadlock: 0W0 on rank 0 waits for 0I0 on rank 0, which stands after", "0W0"),
        (
            by_hand(ONE, 1, "(0F0;0B0)OVERLAP_F_B"),
            r"a pair is a forward and a backward of different",
            "(0F0;0B0)OVERLAP_F_B",
        ),
        (by_hand(ONE, 1, "0F0 0B0 0SEND_F0"), r"0SEND_F0: nothing moves there between ranks", "0SEND_F0"),
        (by_hand(TWO, 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"), r"1SEND_B0 is missing", "1B0  (end)"),
        (by_hand(TWO, 1, "0F0 0B0 0STEP", "1F0 1B0"), r"1STEP is missing", "1B0  (end)"),
        (by_hand(ONE, 1, "0F0 0OFFLOAD0 0B0"), r"0B0 comes after its OFFLOAD without a RELOAD between them", "0B0"),
        (by_hand(ONE, 1, "0F0 0OFFLOAD0 0B0 0RELOAD0"), r"0B0 comes after its OFFLOAD without a RELOAD", "0B0"),
        (by_hand(ONE, 1, "0F0 0OFFLOAD0 0RELOAD0 0OFFLOAD0 0B0"), r"0OFFLOAD0 stands twice", "0OFFLOAD0"),
        (by_hand(ONE, 1, "0F0 0B0 0OFFLOAD0"), r"0OFFLOAD0 comes after the backward that frees its", "0OFFLOAD0"),
        (
            by_hand(ONE, 1, "0F0 0RELOAD0 0B0"),
            r"0RELOAD0 on rank 0 waits for 0OFFLOAD0, which no rank does",
            "0RELOAD0",
        ),
        (by_hand(Placement.fold(1), 1, "0F0 1F0 1B0 0B0 1STEP"), r"1STEP: STEP names the lowest stage", "1STEP"),
    ],
)
def test_faults_and_their_cells(schedule, message, cell):
    with pytest.raises(ScheduleError, match=message) as error:
        validate(schedule)
    assert f"{cell} <-- ERROR HERE" in str(error.value)


def test_a_deadlock_across_ranks_that_torch_accepts():
    """Each rank's own order is sound; only together do they block."""
    fold = Placement.fold(2)
    schedule = by_hand(fold, 2, "0F0 3F1 0F1 3F0 3B0 0B0 3B1 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert error.value.reason == (
        "deadlock: 3F1 on rank 0 waits for 2F1 on rank 1, which stands after 1F1; "
        "1F1 on rank 1 waits for 0F1 on rank 0, which stands after 3F1"
    )
    assert str(error.value).splitlines()[1:] == [
        "  rank 0   0F0  3F1 <-- ERROR HERE  0F1  3F0  3B0  0B0  ...",
        "  rank 1   1F0  2F0  *1F1  2F1  2B0  1B0  2B1  ...",
    ]


def test_a_deadlocks_blocked_slots_are_distinguished_from_later_ones():
    schedule = by_hand(Placement.interleaved(3, 2), 1, "0F0 3F0 0B0 3B0", "1F0 4F0 4B0 1B0", "2F0 5F0 5B0 2B0")
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert error.value.reason == (
        "deadlock: 0B0 on rank 0 waits for 1I0 on rank 1, which cannot start; "
        "1B0 on rank 1 waits for 2I0 on rank 2, which cannot start; "
        "2B0 on rank 2 waits for 3I0 on rank 0, which stands after 0B0"
    )


def test_rows_and_ranks_must_agree():
    with pytest.raises(ValueError, match=r"1 rows, its placement has 2 ranks"):
        validate(by_hand(TWO, 1, "0F0 0B0"))


def test_a_cap_needs_costs_and_marks_the_cell_that_exceeds_it():
    schedule = generate("gpipe", Placement.straight(2), 4)
    costs = CostModel.unit(2)
    validate(schedule, costs=costs, memory_cap_bytes=4.0)
    with pytest.raises(ScheduleError, match=r"rank 0 would hold 4 bytes of activations \(4 chunks\)"):
        validate(schedule, costs=costs, memory_cap_bytes=3.5)
    with pytest.raises(ValueError, match=r"memory_cap_bytes=3.5: it needs costs"):
        validate(schedule, memory_cap_bytes=3.5)


@settings(max_examples=100)
@given(maybe_lowered, st.data())
def test_a_missing_action_is_noticed(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    index = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    slot = schedule.rows[rank][index]
    rows = [list(row) for row in schedule.rows]
    half = data.draw(st.integers(0, len(slot) - 1))
    rows[rank][index : index + 1] = [slot[:half] + slot[half + 1 :]] if len(slot) > 1 else []
    missing = schedule.with_rows(rows)
    if not schedule.ops <= missing.ops:  # the last one of its kind: that kind of action is not there at all
        assume(slot[0].op in (Op.F, Op.B, Op.I, Op.W))
    with pytest.raises(ScheduleError, match="is missing"):
        validate(missing)


@settings(max_examples=100)
@given(maybe_lowered, st.data())
def test_validation_agrees_with_a_plain_search_for_an_order(schedule, data):
    """Swap two slots of a row: accepted exactly if some order of all ranks can run it."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.rows[rank])
    one = data.draw(st.integers(0, len(row) - 1))
    other = data.draw(st.integers(max(0, one - 4), min(len(row) - 1, one + 4)))
    row[one], row[other] = row[other], row[one]
    rows = [list(r) for r in schedule.rows]
    rows[rank] = row
    swapped = schedule.with_rows(rows)
    if runs(swapped):
        validate(swapped)
    else:
        with pytest.raises(ScheduleError, match=r"deadlock: .*\n(.*\n)*.*<-- ERROR HERE") as error:
            validate(swapped)
        assert re.search(r"waits for \w+ on rank \d+, which stands after", str(error.value))


def runs(schedule):
    """Run all ranks round robin, one slot at a time, until none can go on."""
    done, fronts = set(), [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.rows):
            if fronts[rank] < len(row):
                slot = row[fronts[rank]]
                if all(need in done for action in slot for need in schedule.dependencies(action)):
                    done.update(fact for action in slot for fact in establishes(action))
                    fronts[rank] += 1
                    progress = True
    return all(front == len(row) for front, row in zip(fronts, schedule.rows, strict=True))


@given(schedules(kinds=("w",)))
def test_pairs_are_accepted_only_between_different_microbatches(schedule):
    for rank, row in enumerate(schedule.rows):
        for index, slot in enumerate(row):
            if len(slot) == 2:
                rows = [list(r) for r in schedule.rows]
                rows[rank][index] = slot[::-1]
                with pytest.raises(ScheduleError, match="a pair is a forward and a backward"):
                    validate(schedule.with_rows(rows))
                return


def test_large_errors_show_the_neighbourhood_only():
    schedule = lower(generate("1f1b", Placement.straight(32), 64))
    rows = [list(row) for row in schedule.rows]
    index = rows[16].index((Action(Op.F, 16, 40),))
    del rows[16][index]
    with pytest.raises(ScheduleError) as error:
        validate(schedule.with_rows(rows))
    assert len(str(error.value).splitlines()) == 10
