"""The attacks of `benchmarks faults`, tried at an endpoint of this process."""

import socket
import struct
from contextlib import ExitStack

import pytest

from benchmarks.netbed import attackers as module
from benchmarks.netbed.attackers import attack
from tests.comm.test_wan import KEY, Pair, noise


def test_attackers_are_refused_and_what_is_no_refusal_is_seen(monkeypatch):
    monkeypatch.setattr(module, "_scan", lambda host: 1)
    with ExitStack() as stack:
        pair = Pair(stack, proxied=True)
        pair.exchange("a", noise(1000))
        recorded = [bytes(said[:120]) for said in pair.proxy.recorded]
        assert attack(None, None, pair.ends[1].address, 1, recorded, KEY.secret) == 1
        assert pair.ends[1].refused >= 3 + len(recorded)
        pair.exchange("a", noise(1000, 1))
        with socket.create_server(("127.0.0.1", 0)) as talker:
            address = talker.getsockname()
            monkeypatch.setattr(module, "_answer", lambda *_, **__: 65)
            with pytest.raises(AssertionError):
                attack(None, None, address, 1, recorded, KEY.secret)


def test_a_handshake_is_put_together_from_packets():
    def packet(payload, *, port=7000, flags=0x18, protocol=6):
        tcp = struct.pack("!HHIIBBHHH", 40000, port, 0, 0, 5 << 4, flags, 0, 0, 0) + payload
        return struct.pack("!BBHIBBHII", 0x45, 0, 20 + len(tcp), 0, 64, protocol, 0, 0, 0) + tcp

    said = {}
    for one in (
        packet(b"before it began"),
        packet(b"", flags=2),
        packet(b"hel") + b"padding of the line",
        packet(b"x", port=7001),
        packet(b"x", protocol=17),
        packet(b"lo"),
    ):
        module._note(one, 7000, said)
    assert said == {40000: b"hello"}
