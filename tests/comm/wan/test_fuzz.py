"""Tests with randomly damaged input from a socket, the same each time: no peer gets in, and others continue."""

import contextlib
import random
import socket
from contextlib import ExitStack

import pytest
import torch

from tests.comm.wan.test_endpoint import SMALL, Pair, noise, until
from tests.comm.wan.test_frames import BYE, CHUNK, DATA, RoguePeer
from tests.security.damage import damaged
from weft.comm.channel import TensorSpec

SESSIONS = 300


def say(address, data):
    """Says it in two pieces and leaves, as a peer may that crashes."""
    with socket.create_connection(address, timeout=10) as client, contextlib.suppress(OSError):
        half = len(data) // 2
        client.sendall(data[:half])
        client.sendall(data[half:])
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tls", [False, True])
def test_damaged_handshakes_are_refused(tls):
    luck = random.Random(5)
    with ExitStack() as stack:
        pair = Pair(stack, proxied=True, tls=tls)
        pair.exchange("a", noise(1000))
        # One that is still being opened would count as one more afterwards.
        until(lambda: all(end.counters(1 - rank).ready == SMALL["connections"] for rank, end in enumerate(pair.ends)))
        recorded = [bytes(said) for said in pair.proxy.recorded]
        link = pair.ends[1].counters(0)
        for _ in range(SESSIONS):
            say(pair.ends[1].address, damaged(luck.choice(recorded)[: luck.choice([60, 88, 120, 400])], luck))
        until(lambda: pair.ends[1].refused == SESSIONS, timeout_s=60.0)
        pair.exchange("b", noise(50_000))
        after = pair.ends[1].counters(0)
        assert (after.broken, after.ready) == (link.broken, link.ready)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_damaged_frames_of_an_insider_cost_his_own_link_at_most():
    luck = random.Random(6)
    with ExitStack() as stack:
        pair = Pair(stack)
        victim = pair.ends[1]
        victim.link(5)
        channel = victim.channel(5)
        waiting = [channel.recv("a", TensorSpec((3 * CHUNK,), torch.uint8)) for _ in range(8)]
        good = [
            RoguePeer.frame(kind, bytes(size), message=message, total=total, offset=offset, lane=lane)
            for message in range(3)
            for kind, size, total, offset, lane in (
                (DATA, CHUNK, 3 * CHUNK, 0, 0),
                (DATA, CHUNK, 3 * CHUNK, 2 * CHUNK, 0),
                (DATA, 0, 0, 0, 0xFFFF),
                *((kind, 0, 0, luck.randrange(1 << 64), 0) for kind in range(2, BYE)),
            )
        ]
        for session in range(SESSIONS):
            with contextlib.suppress(OSError):
                peer = RoguePeer(victim.address, slot=session % 3)
                frames = b"".join(luck.choices(good, k=6))
                peer.socket.sendall(damaged(frames, luck) if luck.random() < 0.9 else frames)
                peer.socket.close()
        pair.exchange("b", noise(50_000))
        del waiting
