"""Caches over the WAN channel: what two agents with NIXL's interface read and write, and who is refused."""

import json
import random
import socket
import ssl
from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip("weft.inference", reason="needs the feature prefill")
pytest.importorskip("weft.comm.wan", reason="needs the feature wan")

from tests.waiting import until
from weft.inference.worker.wan_agent import BATCH_BYTES, WanAgent, batches

HOST = "127.0.0.1"


class Cache:
    """An agent with memory in blocks, as vLLM registers it."""

    def __init__(self, blocks, size, seed, **settings):
        self.bytes = np.random.default_rng(seed).integers(0, 256, blocks * size, dtype=np.uint8)
        self.agent = WanAgent("name", None, bind=HOST, **settings)
        begin = self.bytes.ctypes.data
        self.agent.register_memory(self.agent.get_reg_descs([(begin, self.bytes.nbytes, 0, "")], "DRAM"))
        self.blocks = [(begin + number * size, size, 0) for number in range(blocks)]

    def to(self, other, operation, mine, theirs, notice=b""):
        """A transfer between blocks of this cache and of another one, which ends or fails."""
        agent = self.agent
        name = agent.add_remote_agent(other.agent.get_agent_metadata())
        here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(self.blocks, "DRAM"))
        there = agent.prep_xfer_dlist(name, agent.get_xfer_descs(other.blocks, "DRAM"))
        transfer = agent.make_prepped_xfer(operation, here, mine, there, theirs, notif_msg=notice)
        agent.transfer(transfer)
        until(lambda: agent.check_xfer_state(transfer) != "PROC", 60)
        return agent.check_xfer_state(transfer)


def of(cache, ids, size):
    return [bytes(cache.bytes[number * size : (number + 1) * size]) for number in ids]


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize(("blocks", "size"), [(7, 48), (40, 3 * BATCH_BYTES // 2), (5000, 512)])
def test_blocks_arrive_and_their_notice_after_them(operation, blocks, size):
    draw = random.Random(blocks)
    mine, theirs = (draw.sample(range(blocks), blocks // 2) for _ in range(2))
    here, there = Cache(blocks, size, 1), Cache(blocks, size, 2)
    if blocks == 40:  # adjacent at both ends, and more than a window
        mine = theirs = list(range(blocks))
    source, target = ((there, theirs), (here, mine)) if operation == "READ" else ((here, mine), (there, theirs))
    expected = of(*source, size)
    untouched = set(range(blocks)) - set(target[1])
    before = of(target[0], untouched, size)
    assert here.to(there, operation, mine, theirs, b"\xff:1") == "DONE"
    until(lambda: [b"\xff:1"] in there.agent.get_new_notifs().values(), 10)
    assert of(*target, size) == expected
    assert of(target[0], untouched, size) == before


def test_adjacent_blocks_of_adjacent_regions_are_one_piece_that_both_hold():
    here, there = Cache(4, 64, 1), Cache(4, 64, 2)
    begin = there.bytes.ctypes.data
    there.agent.deregister_memory(there.agent._memory[:])
    there.agent.register_memory([(begin, 128), (begin + 128, 128)])
    expected = of(there, [1, 2], 64)
    assert here.to(there, "READ", [1, 2], [1, 2]) == "DONE"
    assert of(here, [1, 2], 64) == expected
    assert not there.agent._holds(begin + 128, -64) and not there.agent._holds(begin + 192, 65)


def test_batches_depend_on_sizes_only_and_cover_all():
    draw = random.Random(3)
    sizes = [draw.choice([1, 100, BATCH_BYTES // 3, BATCH_BYTES, 5 * BATCH_BYTES + 7]) for _ in range(200)]
    cut = [list(batches([(first, size) for size in sizes])) for first in (0, 10**9)]
    assert [[size for _, size in batch] for batch in cut[0]] == [[size for _, size in batch] for batch in cut[1]]
    totals = [sum(size for _, size in batch) for batch in cut[0]]
    assert sum(totals) == sum(sizes)
    assert set(totals[:-1]) == {BATCH_BYTES}


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_memory_that_is_not_registered_stays_as_it_is(operation):
    here, there = Cache(4, 64, 1), Cache(4, 64, 2)
    there.agent.deregister_memory(there.agent._memory[:])
    before = bytes(there.bytes), bytes(here.bytes)
    assert here.to(there, operation, [0, 1], [2, 3]) == "ERR"
    assert (bytes(there.bytes), bytes(here.bytes)) == before


def test_a_transfer_with_an_agent_that_has_gone_fails_and_a_new_connection_works():
    here, there = Cache(4, 64, 1), Cache(4, 64, 2)
    name = here.agent.add_remote_agent(there.agent.get_agent_metadata())
    assert here.agent.check_remote_metadata(name)
    for peer in list(here.agent._peers.values()):
        peer.endpoint.close(linger_s=0.0)
    with pytest.raises(ConnectionError):
        here.agent._peers[name].close()
        here.agent.send_notif(name, b"late")
    assert not here.agent.check_remote_metadata(name)
    here.agent.remove_remote_agent(name)
    assert here.to(there, "READ", [0, 1], [2, 3]) == "DONE"


def test_a_limit_of_the_rate_holds_over_all_peers():
    size, mbps = 1 << 20, 80.0
    here, there = Cache(8, size, 1), Cache(8, size, 2, mbps=mbps)
    name = here.agent.add_remote_agent(there.agent.get_agent_metadata())
    descs = here.agent.get_xfer_descs
    sides = ("", descs(here.blocks, "DRAM")), (name, descs(there.blocks, "DRAM"))
    transfers = [here.agent.make_prepped_xfer("READ", sides[0], [at], sides[1], [at]) for at in range(8)]
    for transfer in transfers:
        here.agent.transfer(transfer)
    until(lambda: all(here.agent.check_xfer_state(transfer) == "DONE" for transfer in transfers), 60)
    assert max(transfer.seconds for transfer in transfers) > 0.95 * 7 * size * 8e-6 / mbps


def test_another_key_is_refused_and_so_is_no_tls(monkeypatch):
    there = Cache(4, 64, 2)
    monkeypatch.setenv("WEFT_KEY", "another key, which is as long")
    other = Cache(4, 64, 1)
    with pytest.raises((OSError, ssl.SSLError)):
        other.agent.add_remote_agent(there.agent.get_agent_metadata())
    with socket.create_connection(json.loads(there.agent.get_agent_metadata()), timeout=10) as plain:
        plain.sendall(b'{"job": "1"}\n' * 3)
        assert b"port" not in b"".join(iter(lambda: plain.recv(4096), b""))


def test_device_memory_is_refused():
    with pytest.raises(ValueError, match="kv_buffer_device"):
        Cache(4, 64, 2).agent.get_reg_descs([], "VRAM")


def test_idle_connections_without_a_key_keep_no_agent_from_connecting():
    here, there = Cache(4, 64, 1), Cache(4, 64, 2)
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(there.agent.address, timeout=10))
        assert here.to(there, "READ", [0, 1], [2, 3]) == "DONE"
