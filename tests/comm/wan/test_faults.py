"""The WAN channel on an emulated WAN whose lines are broken in every way we know."""

import math
import os
import re
import signal
import threading
import time

import pytest
import torch

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.library import load
from weft.tools.netbed import Job, Link, NetBed, Node, Topology, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")]

KEY = WanKey(b"a key for tests, long enough")
MESSAGE = TensorSpec((256 << 10,), torch.uint8)
AHEAD = 4


@pytest.fixture(scope="module")
def bed():
    load()
    nodes = tuple(Node(name=name, site=site, uplink_mbps=200) for name, site in (("a", "east"), ("b", "west")))
    topology = Topology(name="faults", nodes=nodes, links=(Link(sites=("east", "west"), latency_ms=10),), window_kb=400)
    with NetBed.up(topology) as bed:
        yield bed


@pytest.fixture(autouse=True)
def _healed(bed):
    bed.heal()
    yield
    bed.heal()


def message(index, size=MESSAGE.shape[0]):
    tensor = (torch.arange(size) * (2 * index + 1) + index).to(torch.uint8)
    tensor[:8] = torch.tensor([index]).view(torch.uint8)
    return tensor


def transmit(send, receive, bind, address, seconds, settings):
    """Messages for some time from when they are under way, a few in flight, then one that says how many there were.

    With ``seconds`` of None they end when it hears something.
    """
    with WanEndpoint(rank=0, bind=bind, key=KEY, **settings) as endpoint:
        endpoint.link(1, address=address)
        channel = endpoint.channel(1)
        try:
            in_flight, count, limit, enough = [], 0, math.inf, threading.Event()
            while time.monotonic() < limit and not enough.is_set():
                in_flight.append(channel.send("m", message(count)))
                count += 1
                if len(in_flight) == AHEAD:
                    in_flight.pop(0).wait()
                if count == AHEAD:
                    send("under way")
                    if seconds is None:
                        threading.Thread(target=lambda: receive() and enough.set(), daemon=True).start()
                    else:
                        limit = time.monotonic() + seconds
            in_flight.append(channel.send("m", message(-count)))
            for handle in in_flight:
                handle.wait()
        except ChannelError as error:
            return str(error)
        return endpoint.counters(1)


def accept(send, receive, bind, settings):
    """Checks every message; returns how many came and the longest time without one."""
    with WanEndpoint(rank=1, bind=bind, key=KEY, **settings) as endpoint:
        endpoint.link(0)
        channel = endpoint.channel(0)
        send(endpoint.address)
        posted = [channel.recv("m", MESSAGE) for _ in range(AHEAD)]
        try:
            expected, longest_s, last = 0, 0.0, None
            while True:
                tensor = posted.pop(0).wait()
                now = time.monotonic()
                longest_s, last = max(longest_s, now - (last or now)), now
                index = tensor[:8].view(torch.int64).item()
                if index < 0 or (index == 0 and expected):
                    assert index == -expected
                    return expected, longest_s
                assert index == expected
                assert torch.equal(tensor, message(index))
                expected += 1
                posted.append(channel.recv("m", MESSAGE))
        except ChannelError as error:
            return str(error)


def start(bed, seconds=2.0, **settings):
    settings = {
        **{"connections": 4, "deadline_s": 20.0, "timeout_s": 60.0, "congestion": "cubic", "tls": False},
        **settings,
    }
    receiver = Job(bed, "b", accept, bed.address("b"), settings)
    address = receiver.receive()
    sender = Job(bed, "a", transmit, bed.address("a"), address, seconds, settings)
    assert sender.receive() == "under way"
    return sender, receiver, address


def finish(sender, receiver, name):
    try:
        counters = sender.result(100)
        came = receiver.result(100)
    finally:
        sender.kill()
        receiver.kill()
    assert not isinstance(came, str) and not isinstance(counters, str), f"receiver: {came}; sender: {counters}"
    count, longest_s = came
    print(f"{name}: {count} messages, longest pause {longest_s:.2f} s, {counters}")
    return count, counters


def kill_one_connection(bed, port):
    listed = bed.run("a", ["ss", "-tnH", "dport", f"= :{port}"], capture_output=True, text=True).stdout.splitlines()
    assert len(listed) == 4
    local = re.search(r":(\d+)\s", listed[0])[1]
    bed.run("a", ["ss", "-K", "-tnH", "sport", f"= :{local}"], check=True, capture_output=True)


def test_killed_connections_cost_nothing_but_their_chunks(bed):
    sender, receiver, address = start(bed, seconds=None)  # `ss` takes seconds on a busy machine
    for _ in range(3):
        kill_one_connection(bed, address[1])
        time.sleep(0.4)
    sender.send("enough")
    _, counters = finish(sender, receiver, "one of four connections killed, three times")
    assert counters.broken >= 3


def test_a_cut_of_five_seconds_ends_by_itself(bed):
    sender, receiver, _ = start(bed, seconds=8.0)
    bed.cut("a", "b", for_s=5.0)
    count, _ = finish(sender, receiver, "all cut for 5 s")
    assert count > AHEAD


def test_a_cut_ends_with_every_connection_opened_anew(bed):
    sender, receiver, _ = start(bed, seconds=6.0)
    bed.cut("a", "b", for_s=2.0)  # less than the silence after which connections are given up one by one
    _, counters = finish(sender, receiver, "all cut for 2 s")
    assert counters.broken >= 4
    assert counters.ready == 4


def test_a_flapping_line_carries_on(bed):
    sender, receiver, _ = start(bed, seconds=11.0)
    bed.flap("a", "b", every_s=0.2, for_s=10.0)
    count, _ = finish(sender, receiver, "flapping every 200 ms for 10 s")
    assert count > AHEAD


def test_lost_packets_are_tcps_business(bed):
    bed.drop("a", "b", share=0.01)
    finish(*start(bed, seconds=3.0)[:2], "1 % of packets lost")
    assert sum(node.fault_drops for node in bed.status().nodes) > 0


def test_a_slow_node_slows_and_no_more(bed):
    sender, receiver, _ = start(bed, seconds=3.0)
    bed.slow("a", by=5.0)
    finish(sender, receiver, "one node five times slower")


@pytest.mark.parametrize("tls", [False, True])
def test_flipped_bytes_that_tcp_believes_are_found_and_sent_again(bed, tls):
    sender, receiver, _ = start(bed, tls=tls)
    for _ in range(3):
        bed.flip("a", "b")
        time.sleep(0.4)
    _, counters = finish(sender, receiver, f"a byte flipped three times each way, tls={tls}")
    assert counters.broken >= 3


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped_for_a_while_goes_on_where_it_was(bed, stopped):
    jobs = start(bed, seconds=5.0)[:2]
    os.kill(jobs[stopped].pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(jobs[stopped].pid, signal.SIGCONT)
    finish(*jobs, f"rank {stopped} stopped for 4 s")


def test_a_killed_peer_is_reported_by_name_on_the_other_side(bed):
    for killed in (0, 1):
        jobs = start(bed, seconds=30.0, deadline_s=3.0)[:2]
        jobs[killed].kill()
        survivor = jobs[1 - killed]
        error = survivor.result(30)
        survivor.kill()
        print(f"peer {killed} killed: {error}")
        assert re.match(
            rf"link rank {1 - killed} - rank {killed}\b.*: (the other process has exited|silent for 3 s)", error
        )


def test_a_line_that_stays_dead_is_one_clear_error_on_both_sides(bed):
    sender, receiver, _ = start(bed, seconds=30.0, deadline_s=2.0)
    bed.cut("a", "b")
    errors = sender.result(30), receiver.result(30)
    sender.kill()
    receiver.kill()
    print(*errors, sep="\n")
    for error, link in zip(errors, ("rank 0 - rank 1", "rank 1 - rank 0"), strict=True):
        assert re.match(rf"link {link}\b.*: silent for 2 s", error)
