"""Tests of a rank's messages, compared with what the others expect of it."""

from __future__ import annotations

import pytest

from weft.comm.emulated.conversation import Mismatch, Recorder, Said

GROUP = (704, 737, 767)


def heard():
    right = Recorder(737)
    right.say(GROUP, "group 0", Said("all_reduce SUM", "8192 bfloat16"))
    right.say([753], "to 753", Said("send 45RECV_F0", "(1, 64) bfloat16"))
    return right.heard


def test_the_same_is_expected():
    again = Recorder(737, heard())
    again.say([753], "to 753", Said("send 45RECV_F0", "(1, 64) bfloat16"))  # order counts within a counterpart only
    again.say(GROUP, "group 0", Said("all_reduce SUM", "8192 bfloat16"))
    assert again.heard.said == heard().said


@pytest.mark.parametrize(
    ("others", "counterpart", "said", "message"),
    [
        (
            GROUP,
            "group 0",
            Said("all_reduce SUM", "8192 float32"),
            "rank 737 comes to all_reduce SUM of 8192 float32, where rank 704 expects all_reduce SUM of 8192 bfloat16"
            r": another number format \(float32, not bfloat16\)$",
        ),
        (
            GROUP,
            "group 0",
            Said("all_reduce SUM", "4096 bfloat16"),
            r"bfloat16: another number of elements \(4096, not 8192\)$",
        ),
        (
            [753],
            "to 753",
            Said("send 45RECV_F0", "(2, 64) float32"),
            r"another shape \(\(2, 64\), not \(1, 64\)\) and another number format \(float32, not bfloat16\)$",
        ),
        (GROUP, "group 0", Said("barrier"), "rank 704 expects all_reduce SUM of 8192 bfloat16$"),
        ([753], "to 753", Said("send 45RECV_F7", "(1, 64) bfloat16"), "where rank 753 expects send 45RECV_F0"),
        ([721], "to 721", Said("send 44RECV_B0", "(1, 64) bfloat16"), r"rank 721 expects nothing of it \(to 721\)"),
    ],
)
def test_the_first_difference_names_both_ranks_and_what_each_does(others, counterpart, said, message):
    with pytest.raises(Mismatch, match=message):
        Recorder(737, heard()).say(others, counterpart, said)


def test_more_than_the_others_do_is_a_difference():
    again = Recorder(737, heard())
    again.say([753], "to 753", Said("send 45RECV_F0", "(1, 64) bfloat16"))
    with pytest.raises(Mismatch, match="rank 753 expects nothing more of it"):
        again.say([753], "to 753", Said("send 45RECV_F1", "(1, 64) bfloat16"))
