"""The clock check: what a driver that is ahead, right or silent looks like from a host."""

import asyncio
import threading
import time
import uuid

import pytest

from weft.conf.host.diagnosis import Outcome
from weft.engine.supervision import control as clock
from weft.engine.supervision.control import ControlServer


class Driver:
    """A driver that answers nothing but what the time is, on a thread of its own."""

    def __init__(self, ahead_s):
        self.address, self.ahead_s = f"weft-test-{uuid.uuid4().hex}", ahead_s
        self._listening, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._listening.wait(60)
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(60)

    async def _serve(self):
        def on_message(peer, message):
            assert peer.startswith(clock.CLOCK_CLIENT)
            answer = clock.answer_clock(message)
            server.send(peer, answer | {"at": answer["at"] + self.ahead_s})

        server = ControlServer(on_message=on_message)
        await server.listen(self.address)
        self._listening.set()
        while not self._end.is_set():
            await asyncio.sleep(0.02)
        await server.close()


@pytest.mark.parametrize(
    ("ahead_s", "outcome"), [(0.0, Outcome.passed), (60.0, Outcome.failed), (-60.0, Outcome.failed)]
)
def test_offset(ahead_s, outcome):
    with Driver(ahead_s) as driver:
        result = clock.check_clock(driver.address)
    assert result.outcome is outcome
    assert ("behind" if ahead_s > 0 else "ms") in result.text


def test_a_shifted_clock_is_seen():
    with Driver(0.0) as driver:
        assert clock.check_clock(driver.address, shift_s=60.0).outcome is Outcome.failed


def test_silent_servers_are_reported(monkeypatch):
    measure = clock.clock_offset
    monkeypatch.setattr(clock, "clock_offset", lambda address: measure(address, most_s=0.3))
    result = clock.check_clock("weft-test-nobody")
    assert result.outcome is Outcome.failed and "does not answer" in result.text


def test_other_messages_are_not_answered():
    assert clock.answer_clock({"host": "a"}) is None
    assert abs(clock.answer_clock({"clock": 3})["at"] - time.time()) < 60
