"""Unauthenticated peers at the WAN port: none gets in, and none disturbs a transfer."""

import hashlib
import os
import socket
import struct

import pytest
import torch

from tests.comm.wan.test_endpoint import KEY, Pair, noise, until
from tests.comm.wan.test_frames import RoguePeer
from weft.comm.channel import ChannelError
from weft.comm.key import WanKey
from weft.comm.wan.endpoint import WanEndpoint


def says(address, data, *, then=b"", listen_s=5.0):
    """Return the port's answer to ``data``, and to ``then``, before it closes; it must close."""
    with socket.create_connection(address, timeout=listen_s) as client:
        client.sendall(data)
        answer = b""
        try:
            while more := client.recv(4096):
                answer += more
                client.sendall(then)
                then = b""
        except ConnectionError:
            pass
        return answer


def hello(*, magic=b"weftwan2", job="", sender=0, to=1, slot=0, connections=1, chunk_bytes=4096):
    head = struct.pack("<8s16s", magic, hashlib.sha256(job.encode()).digest())
    return head + struct.pack("<IIQIIII", sender, to, 7, slot, connections, chunk_bytes, 0) + os.urandom(32)


FRAME = struct.pack("<IHHQQQII48sII", 0x74666577, 1, 0, 0, 1 << 32, 0, 0xFFFFFFFF, 0, b"a", 0, 0)


def test_nonsense_is_turned_away_without_a_word(stack):
    pair = Pair(stack)
    address = pair.ends[1].address
    nonsense = [os.urandom(200), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, FRAME, b"\0" * 100]
    nonsense += [hello(magic=b"weftwan9"), hello(to=3), hello(slot=5), hello(connections=1 << 31, slot=1 << 30)]
    for data in nonsense:
        assert says(address, data) == b""
    assert pair.ends[1].refused == len(nonsense)
    pair.exchange("a", noise(100_000))


def test_a_greeting_without_the_key_earns_a_random_number_and_no_more(stack):
    pair = Pair(stack)
    answer = says(pair.ends[1].address, hello(), then=bytes(32) + FRAME)
    assert len(answer) == 80  # the challenge, and then the end of the connection
    assert pair.ends[1].refused == 1
    pair.exchange("a", noise(100_000))


def test_a_recorded_handshake_opens_nothing(stack):
    pair = Pair(stack, proxied=True)
    pair.exchange("a", noise(1000))
    before = pair.ends[1].counters(0)
    for recording in pair.proxy.recorded:
        assert len(recording) > 120
        assert len(says(pair.ends[1].address, recording[:88], then=recording[88:])) == 80
    assert pair.ends[1].refused == len(pair.proxy.recorded)
    pair.exchange("a", noise(1000, 1))
    after = pair.ends[1].counters(0)
    assert after.broken == before.broken == 0
    assert after.received_bytes == before.received_bytes + 1000


def test_a_port_scan_and_silent_connections_do_not_keep_peers_out(stack):
    pair = Pair(stack, proxied=True)
    pair.exchange("a", noise(1000))
    connections = [socket.create_connection(pair.ends[1].address) for _ in range(100)]  # more than it has space for
    for _ in range(30):
        socket.create_connection(pair.ends[1].address).close()
    pair.proxy.kill(3)  # the peer must come in again past all of them
    pair.exchange("a", noise(1000, 1))
    until(lambda: pair.ends[1].refused >= 130, timeout_s=10)
    for connection in connections:
        assert connection.recv(1) == b""
        connection.close()
    pair.exchange("a", noise(1000, 2))


@pytest.mark.parametrize("tls", [False, True])
def test_another_key_is_no_key(stack, tls):
    pair = Pair(stack, tls=tls)
    impostor = WanEndpoint(
        rank=0, bind="127.0.0.1", key=WanKey(b"another key of some length"), deadline_s=1.5, timeout_s=1.5, tls=tls
    )
    stack.callback(impostor.close, linger_s=0.0)
    impostor.link(1, address=pair.ends[1].address)
    with pytest.raises(ChannelError, match=r"no contact within 1.5 s; last trouble: to 127.0.0.1:\d+: "):
        impostor.channel(1).send("a", noise(8)).wait()
    assert pair.ends[1].refused > 0
    pair.exchange("a", noise(1000))


@pytest.mark.parametrize("tls", [False, True])
def test_what_is_left_of_another_attempt_gets_no_link_and_ends_none(stack, tls):
    """It has the key, the rank, and the address."""
    pair = Pair(stack, job="second attempt", tls=tls)
    pair.exchange("a", noise(1000))
    settings = {"bind": "127.0.0.1", "key": KEY, "deadline_s": 1.0, "timeout_s": 1.0, "tls": tls}
    for job in ("first attempt", ""):
        zombie = WanEndpoint(rank=0, job=job, **settings)
        stack.callback(zombie.close, linger_s=0.0)
        zombie.link(1, address=pair.ends[1].address)
        with pytest.raises(
            ChannelError, match=r"no contact within 1 s; .*belongs to another job, or to another attempt"
        ):
            zombie.channel(1).send("a", noise(8)).wait()
    pair.exchange("a", noise(1000, 1))
    assert pair.ends[1].counters(0).broken == 0


def test_a_peer_of_another_attempt_that_goes_on_all_the_same_is_turned_away(stack):
    victim = WanEndpoint(rank=1, bind="127.0.0.1", key=KEY, job="second attempt", tls=False)
    stack.callback(victim.close, linger_s=0.0)
    victim.link(5)
    with pytest.raises(ConnectionError):
        RoguePeer(victim.address, job="first attempt")
    assert victim.counters(5).ready == 0
    RoguePeer(victim.address, job="second attempt")


def test_a_false_listener_is_found_out(stack):
    """Who listens must prove the key as well: a peer sends nothing to a port that only echoes."""
    false = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    peer = WanEndpoint(rank=0, bind="127.0.0.1", key=KEY, deadline_s=0.5, timeout_s=0.5, connections=1, tls=False)
    stack.callback(peer.close, linger_s=0.0)
    peer.link(1, address=false.getsockname())
    handle = peer.channel(1).send("a", torch.full((4000,), 7, dtype=torch.uint8))
    connection, _ = false.accept()
    heard = connection.recv(4096)
    assert len(heard) == 88
    connection.sendall(heard[:8] + heard[8:24] + struct.pack("<IIQII", 1, 0, 7, 4096, 0) + os.urandom(32))
    assert len(connection.recv(4096)) == 32  # its proof
    connection.sendall(os.urandom(32))
    assert connection.recv(4096) == b""  # and not a byte of the tensor
    connection.close()
    with pytest.raises(ChannelError, match="a different key"):
        handle.wait()


def test_tls_and_clear_do_not_mix(stack):
    pair = Pair(stack, tls=True)
    clear = WanEndpoint(rank=0, bind="127.0.0.1", key=KEY, deadline_s=0.5, timeout_s=0.5, tls=False)
    stack.callback(clear.close, linger_s=0.0)
    clear.link(1, address=pair.ends[1].address)
    with pytest.raises(ChannelError, match="no contact"):
        clear.channel(1).send("a", noise(8)).wait()
    pair.exchange("a", noise(1000))


def test_tls_hides_what_passes(stack):
    for tls in (False, True):
        pair = Pair(stack, proxied=True, tls=tls)
        pair.exchange("secret tag", torch.full((2000,), 0x41, dtype=torch.uint8))
        said = b"".join(bytes(recording) for recording in pair.proxy.recorded)
        assert (b"secret tag" in said, b"A" * 500 in said) == (not tls, not tls)
