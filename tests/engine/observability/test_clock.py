"""Marks tell when the device came to them, not when the host called."""

import pytest
import torch

from weft.engine.observability import clock

EPOCH_S = 1e9
"""Between the two clocks of the host."""


class World:
    """A host whose clocks stand still but where it waits, and a device that passes events ``lag_s`` late."""

    def __init__(self):
        self.now_s, self.lag_s = 100.0, 0.0

    def event(self, **_):
        return Event(self)


class Event:
    def __init__(self, world):
        self.world = world

    def record(self, stream=None):
        # A stream of its own is not held up by what the current one has queued.
        self.at_s = self.world.now_s + (self.world.lag_s if stream is None else 0.0)

    def synchronize(self):
        self.world.now_s = max(self.world.now_s, self.at_s)

    def elapsed_time(self, other):
        return 1000 * (other.at_s - self.at_s)


@pytest.fixture
def world(monkeypatch):
    found = World()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "a stream")
    monkeypatch.setattr(clock, "monotonic_ns", lambda: round(found.now_s * 1e9))
    monkeypatch.setattr(clock, "perf_counter", lambda: found.now_s)
    monkeypatch.setattr(clock, "time", lambda: EPOCH_S + found.now_s)
    return found


def test_a_host_clock_tells_the_time_of_its_marks(world):
    mark = clock.HostClock().mark()
    world.now_s += 7
    assert clock.HostClock().wall_s(mark) == EPOCH_S + 100


def test_a_step_begins_when_its_device_does(world):
    """The host is half a second ahead, and asks much later; the step's wall time is the device's."""
    world.lag_s = 0.5
    mark = clock.CudaClock().mark()
    world.now_s += 7
    assert clock.CudaClock().wall_s(mark) == pytest.approx(EPOCH_S + 100.5, abs=1e-6)


def test_a_thread_that_comes_late_finds_the_time_all_the_same(world):
    times = clock.DeviceTimes(torch.device("cpu"))
    world.lag_s = 0.1
    event = times.mark()
    world.now_s += 3
    assert times.passed_ns(event) == pytest.approx(100.1e9, abs=10)


def test_clocks_are_tied_again_before_they_drift(world):
    times = clock.DeviceTimes(torch.device("cpu"))
    first = times._tied
    assert times.passed_ns(times.mark()) and times._tied is first
    event = times.mark()
    world.now_s += clock.TIE_EVERY_NS / 1e9 + 1
    assert times.passed_ns(event) == pytest.approx(100e9, abs=10)
    assert times._tied is not first
