"""Whatever is sent over a channel inside a site arrives whole and in order."""

import pytest

from tests.comm.exchange import exchange
from weft.tools.ranks import run_ranks


@pytest.mark.parametrize("shared", [False, True], ids=["torch", "shared memory"])
def test_tensors_arrive_whole(shared):
    assert run_ranks(2, exchange, shared, 120) == [[], []]
