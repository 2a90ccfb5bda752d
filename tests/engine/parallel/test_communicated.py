"""Axis groups over ranks: what they compute, and what is said when a member has gone."""

import pytest

from tests.engine.parallel.lost_member import exchanged, lose, shifted
from weft.tools.ranks import run_ranks


@pytest.mark.slow
def test_operations_are_those_of_threads():
    first, second = run_ranks(2, exchanged, "tensor", timeout_s=120)
    rows = [[0.0, 1.0], [2.0, 3.0]], [[10.0, 11.0], [12.0, 13.0]]
    for found, summed, exchanged_rows in (
        (first, [10.0, 12.0], rows[0][0] + rows[1][0] + rows[1][1]),
        (second, [14.0, 16.0], rows[0][1]),
    ):
        assert found[0] == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
        assert found[1] == summed
        assert found[2] == [10.0, 12.0, 14.0, 16.0]
        assert found[3] == [10.0, 11.0, 12.0, 13.0]
        assert found[4] == exchanged_rows
    assert (first[5], second[5]) == ([10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0])


@pytest.mark.slow
def test_what_is_shifted_comes_by_on_all_members_and_home():
    assert run_ranks(3, shifted, 3, timeout_s=120) == [[0.0, 2.0, 1.0], [1.0, 0.0, 2.0], [2.0, 1.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
def test_a_lost_member_is_one_error_that_names_the_axis_and_its_ranks(axis):
    said, _ = run_ranks(2, lose, axis, timeout_s=120)
    assert said.startswith(f"{axis} axis of ranks 0, 1, on rank 0: all_gather")
    assert said.endswith("; rank 1 is lost")


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "operation"), [("tensor", "all_gather"), ("context", "shift")])
def test_of_several_members_the_lost_one_is_named(axis, operation):
    said = run_ranks(4, lose, axis, 4, operation, timeout_s=120)
    assert not said[2]
    for rank in (0, 1, 3):
        assert said[rank].startswith(f"{axis} axis of ranks 0, 1, 2, 3, on rank {rank}: {operation}")
        assert said[rank].endswith("; rank 2 is lost")
