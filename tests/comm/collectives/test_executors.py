"""Tests of a collective's result, with an emulated device."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from weft.comm.collectives.executors import HostedResult, StreamResult


class Event:
    """An event that counts who waits for it."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1


class Result:
    """A tensor of the device, and the streams on which its memory is in use."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


@pytest.fixture
def event(monkeypatch):
    event = Event()

    class Stream:
        def record_event(self):
            return event

        def wait_event(self, event):
            event.wait()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return event


def test_a_stream_s_tensor_is_had_once_the_current_stream_waits_for_it(event):
    tensor = Result()
    result = StreamResult(tensor)
    assert not event.waits and not tensor.streams
    assert result.result() is tensor and event.waits == 1
    assert len(tensor.streams) == 1, "its memory is in use on the current stream"


def test_what_a_thread_starts_is_waited_for_on_the_host_and_then_as_for_a_stream(event):
    started: Future[StreamResult] = Future()
    result, tensor = HostedResult(started), Result()
    started.set_result(StreamResult(tensor))
    assert not event.waits
    assert result.result() is tensor and event.waits == 1
