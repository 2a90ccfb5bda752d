"""The stand-in keeps NCCL's rules: it stops what NCCL stops, lets through what NCCL lets through, and says where."""

import pytest

from tests.nccl_rules.exchanges import every_rule
from weft.tools.ranks import run_ranks


@pytest.mark.slow
def test_the_rules():
    said = run_ranks(2, every_rule, timeout_s=200)
    for rank, heard in enumerate(said):
        other = 1 - rank
        stuck = heard.pop("receives first")
        assert f"rank {rank} waits for first exchange: the receive from rank {other}" in stuck
        assert f"rank {other} waits for first exchange: the receive from rank {rank}" in stuck
        assert "_receive_then_send" in stuck
        assert f"waits for the send to rank {other}" in heard.pop("sends that cross on one communicator")
        assert heard.pop("a wait with a time-out") == "1 wait(timeout)"
        assert "a tensor in host memory; move it to the device" in heard.pop("a tensor in host memory")
    first, second = said
    late = second.pop("a value behind a posted receive")
    assert "rank 1 waits for float behind the receive from rank 0" in late
    in_another_order = [heard.pop("groups in another order") for heard in said]
    assert any("another rank made" in text for text in in_another_order), in_another_order
    assert first == dict.fromkeys(first, "") and second == dict.fromkeys(second, "")
