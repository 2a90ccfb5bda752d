"""Whatever is sent over a channel inside a site arrives whole and in order."""

import re

import pytest

from tests.comm.exchange import desert, exchange, keep_silent
from weft.tools.ranks import run_ranks


@pytest.mark.parametrize("way", ["gloo", "shared memory"])
def test_tensors_arrive_whole(way):
    assert run_ranks(2, exchange, way, 400) == [[], []]


def test_a_peer_that_ends_is_noticed_at_once():
    """Its last message arrives; what it will never send is an error, and so is what it will never read."""
    said = run_ranks(2, desert, timeout_s=100)
    assert said[0] == "left"
    assert re.fullmatch(r"link rank 0 -> rank 1: second did not arrive and the peer has exited: .*", said[1][0])
    assert re.fullmatch(r"link rank 1 -> rank 0: third could not be sent and the peer has exited: .*", said[1][1])


def test_a_peer_that_says_nothing_is_given_up():
    said = run_ranks(2, keep_silent, "shared memory", timeout_s=100)
    assert said[1] == "link rank 0 -> rank 1: word did not arrive within comm.timeout_s=0.5"
