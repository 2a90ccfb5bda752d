"""Tests of a rank's messages, compared with what the others expect of it."""

import pytest

from weft.comm.emulated.operation_log import Mismatch, Operation, Recorder

GROUP = (704, 737, 767)


def log_of_a_rank():
    right = Recorder(737)
    right.record(GROUP, "group 0", Operation("all_reduce SUM", "8192 bfloat16"))
    right.record([753], "to 753", Operation("send 45RECV_F0", "(1, 64) bfloat16"))
    return right.log


def test_the_same_is_expected():
    again = Recorder(737, log_of_a_rank())
    again.record(
        [753], "to 753", Operation("send 45RECV_F0", "(1, 64) bfloat16")
    )  # order counts within a counterpart only
    again.record(GROUP, "group 0", Operation("all_reduce SUM", "8192 bfloat16"))
    assert again.log.operations == log_of_a_rank().operations


@pytest.mark.parametrize(
    ("others", "counterpart", "operation", "message"),
    [
        (
            GROUP,
            "group 0",
            Operation("all_reduce SUM", "8192 float32"),
            "rank 737 executes all_reduce SUM of 8192 float32, where rank 704 expects all_reduce SUM of 8192 bfloat16"
            r": another number format \(float32, not bfloat16\)$",
        ),
        (
            GROUP,
            "group 0",
            Operation("all_reduce SUM", "4096 bfloat16"),
            r"bfloat16: another number of elements \(4096, not 8192\)$",
        ),
        (
            [753],
            "to 753",
            Operation("send 45RECV_F0", "(2, 64) float32"),
            r"another shape \(\(2, 64\), not \(1, 64\)\) and another number format \(float32, not bfloat16\)$",
        ),
        (GROUP, "group 0", Operation("barrier"), "rank 704 expects all_reduce SUM of 8192 bfloat16$"),
        ([753], "to 753", Operation("send 45RECV_F7", "(1, 64) bfloat16"), "where rank 753 expects send 45RECV_F0"),
        (
            [721],
            "to 721",
            Operation("send 44RECV_B0", "(1, 64) bfloat16"),
            r"rank 721 expects nothing of it \(to 721\)",
        ),
    ],
)
def test_the_first_difference_names_both_ranks_and_what_each_does(others, counterpart, operation, message):
    with pytest.raises(Mismatch, match=message):
        Recorder(737, log_of_a_rank()).record(others, counterpart, operation)


def test_more_than_the_others_do_is_a_difference():
    again = Recorder(737, log_of_a_rank())
    again.record([753], "to 753", Operation("send 45RECV_F0", "(1, 64) bfloat16"))
    with pytest.raises(Mismatch, match="rank 753 expects nothing more of it"):
        again.record([753], "to 753", Operation("send 45RECV_F1", "(1, 64) bfloat16"))
