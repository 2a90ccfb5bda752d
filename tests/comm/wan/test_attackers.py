"""Unauthenticated peers and an insider attack the WAN port of an endpoint in this process."""

import socket
from contextlib import ExitStack

import pytest

from tests.comm.wan import attackers as module
from tests.comm.wan.attackers import attack
from tests.comm.wan.test_endpoint import KEY, Pair, noise


def test_attackers_are_refused_and_what_is_no_refusal_is_seen(monkeypatch):
    monkeypatch.setattr(module, "_scan", lambda host: 1)
    with ExitStack() as stack:
        pair = Pair(stack, proxied=True)
        pair.exchange("a", noise(1000))
        recorded = [bytes(said[:120]) for said in pair.proxy.recorded]
        assert attack(pair.ends[1].address, 1, recorded, KEY.secret) == 1
        assert pair.ends[1].refused >= 3 + len(recorded)
        pair.exchange("a", noise(1000, 1))
        with socket.create_server(("127.0.0.1", 0)) as talker:
            address = talker.getsockname()
            monkeypatch.setattr(module, "_answer", lambda *_, **__: 65)
            with pytest.raises(AssertionError):
                attack(address, 1, recorded, KEY.secret)
