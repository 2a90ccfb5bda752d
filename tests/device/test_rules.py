"""The stand-in keeps NCCL's rules: it stops what NCCL stops, lets through what NCCL lets through, and says where."""

import pytest

from tests.comm.exchange import exchange, keep_silent
from tests.device.build import obstacle
from tests.device.exchanges import every_rule, under_rules
from tests.device.ranks import run_on_devices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(obstacle()), reason=obstacle())]


def test_the_rules():
    said = run_on_devices(2, every_rule)
    for rank, heard in enumerate(said):
        other = 1 - rank
        stuck = heard.pop("receives first")
        assert f"rank {rank} waits for first exchange: the receive from rank {other}" in stuck
        assert f"rank {other} waits for first exchange: the receive from rank {rank}" in stuck
        assert "_receive_then_send" in stuck
        assert f"waits for synchronize behind the send to rank {other}" in heard.pop(
            "sends that cross on one communicator"
        )
        assert heard.pop("a wait with a time-out") == "wait(timeout)"
        assert "a tensor in host memory; move it to the device" in heard.pop("a tensor in host memory")
    first, second = said
    late = second.pop("a value behind a posted receive")
    assert "waits for aten::_local_scalar_dense behind the receive from rank 0" in late
    in_another_order = [heard.pop("groups in another order") for heard in said]
    assert any("another rank made" in text for text in in_another_order), in_another_order
    assert first == dict.fromkeys(first, "") and second == dict.fromkeys(second, "")


def test_tensors_arrive_whole_behind_notes():
    assert run_on_devices(2, under_rules, exchange, "notes", 400) == [[], []]


def test_a_peer_that_sends_no_note_is_given_up():
    said = run_on_devices(2, under_rules, keep_silent, "notes")
    assert said[1] == "link rank 0 -> rank 1: word did not arrive within comm.timeout_s=0.5"
