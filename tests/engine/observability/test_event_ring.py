"""A rank's events reach the collector whole and in order, also after SIGKILL; foreign files are refused."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.conf.schema import WeftConfig
from weft.engine.observability import event_timer
from weft.engine.observability.clock import HostClock
from weft.engine.observability.event_ring import (
    HEADER,
    KINDS,
    Header,
    RingReader,
    RingWriter,
    decode,
    encode,
    encode_slot,
    event_text,
    rings_folder,
)
from weft.engine.observability.event_timer import EventTimer
from weft.engine.observability.measurement import SlotTrace
from weft.engine.observability.watcher import Phase, Watcher
from weft.pipeline.action import COMPUTE, Action, Op, slot_text
from weft.pipeline.generators import generate, generators
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize("kind", ["1f1b", "zbv", "w"])
def test_every_slot_of_a_schedule_is_read_as_it_was_written(kind):
    layout = generators()[kind].placements[0].name
    schedule = lower(generate(kind, Placement.named(layout, 4), 8), zero_stage=3)
    for row in schedule.rows:
        for slot in row:
            assert event_text(*encode_slot(slot)) == slot_text(slot)


@given(st.sampled_from(KINDS), st.integers(-1, 2**24 - 2), st.integers(-1, 2**32 - 2))
def test_an_event_is_one_word(kind, stage, microbatch):
    word = encode(kind, stage, microbatch)
    assert 0 < word < 2**64
    assert decode(word) == (kind, stage, microbatch)


def test_words_that_nothing_wrote_are_no_event():
    assert decode(0) is None and decode(0xFF) is None and event_text(0xFF, 0) == ""


@given(st.lists(st.integers(0, 40), max_size=12))
def test_a_reader_gets_every_record_once_unless_it_is_overwritten(tmp_path_factory, batches):
    folder = tmp_path_factory.mktemp("rings")
    writer = RingWriter(folder, 3, 16)
    reader, count = RingReader(folder / "rank3"), 0
    for batch in batches:
        for number in range(count, count + batch):
            writer.write(number + 1, 0, number, float(number), number + 0.5)
        count += batch
        found = reader.read()
        # A full ring's oldest record may be half overwritten by the next one.
        assert len(found) in ({batch} if count <= 16 else {min(batch, 16), min(batch, 15)})
        assert found["step"].tolist() == list(range(count - len(found), count))
        assert np.array_equal(found["end"] - found["start"], np.full(len(found), 0.5))
    assert reader.lost <= max(0, sum(batch > 15 for batch in batches) * 40)
    assert not reader.is_closed and not reader.is_finished
    writer.close(finished=True)
    assert reader.is_closed and reader.is_finished


DOOMED = """
import os, signal, sys
from pathlib import Path
from weft.engine.observability.event_ring import RingWriter
ring = RingWriter(Path(sys.argv[1]), 0, 64)
for number in range(10):
    ring.write(1, 0, number, 1.0, 2.0)
ring.begin(1 | 3 << 8, 0, 10, 2.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_events_of_a_killed_rank_can_be_read(folder):
    done = subprocess.run([sys.executable, "-c", DOOMED, str(folder)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    reader = RingReader(folder / "rank0")
    assert reader.read()["step"].tolist() == list(range(10))
    assert reader.is_closed and not reader.is_finished
    expected = {"rank": 0, "slot": "2F", "step": 10, "since": 0, "alive": False, "event_s": 0.0}
    assert reader.current() | {"since": 0} == expected


@pytest.mark.parametrize("damage", ["open", "short", "foreign", "size", "link"])
def test_a_file_that_is_no_ring_is_refused(folder, damage):
    RingWriter(folder, 0, 16)
    path = folder / "rank0"
    data = path.read_bytes()
    if damage == "open":
        path.chmod(0o666)
    elif damage == "short":
        path.write_bytes(data[:40])
    elif damage == "foreign":
        path.write_bytes(b"\0" * len(data))
    elif damage == "size":
        words = np.frombuffer(data, "u8").copy()
        words[Header.CAPACITY] = 2**40
        path.write_bytes(words.tobytes())
    else:
        path.rename(folder / "other")
        path.symlink_to(folder / "other")
    with pytest.raises((ValueError, OSError)):
        RingReader(path)


def test_a_ring_needs_a_private_folder(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="not a folder of this user alone"):
        RingWriter(tmp_path, 0, 16)


def test_slots_waits_and_stalls_are_recorded_with_their_step(folder):
    inner = []

    class Waits:
        def begin_wait(self, what):
            inner.append(what)

        def end_wait(self):
            inner.append("end")

    watcher = Watcher()
    watcher.timer = EventTimer(RingWriter(folder, 0, 64), CPU, Waits())
    reader = RingReader(folder / "rank0")
    trace = SlotTrace(HostClock(), watcher.timer)
    with watcher.step(7):
        with watcher.timing("data"):
            pass
        trace.slot_begins((Action(Op.F, 1, 2),))
        assert reader.current()["slot"] == "1F2"
        trace.slot_ends((Action(Op.F, 1, 2),))
        with watcher.waiting():
            watcher.timer.begin_wait("gradients")  # the outermost wait counts
            watcher.timer.end_wait()
    with watcher.within(Phase.checkpoint):
        pass
    found = reader.read()
    texts = [event_text(int(event["first"]), int(event["second"])) for event in found]
    assert texts == ["data", "1F2", "sums", "step", "checkpoint"]
    assert set(found["step"]) == {7} and (found["end"] >= found["start"]).all()
    assert (found["start"][1], found["end"][1]) == (trace.marks[0].start, trace.marks[0].end)
    assert inner == ["sums", "gradients", "end", "end"]
    watcher.close()
    assert reader.is_closed and watcher.timer is None


def test_a_wait_inside_of_a_computation_has_its_virtual_stage(folder):
    timer = EventTimer(RingWriter(folder, 0, 64), CPU)
    reader = RingReader(folder / "rank0")
    for slot in ((Action(Op.B, 3, 0), Action(Op.F, 3, 1)), (Action(Op.RECV_F, 3, 1),), (Action(Op.STEP, 0, None),)):
        timer.slot_begins(slot)
        timer.begin_wait("weights")
        timer.end_wait()
        timer.slot_ended(slot, 0.0, 0.0)
    timer.begin_wait("weights")
    timer.end_wait()
    stages = [event.stage for word in reader.read()["first"] if (event := decode(int(word))).kind == "weights"]
    assert stages == [3, -1, -1, -1]


class LateEvent:
    def __init__(self, at_ns):
        self.at_ns, self.passed = at_ns, False

    def query(self):
        return self.passed


class LateDevice:
    """A device whose events are passed when the test says so. Waiting for one is an error."""

    now_ns = 0

    def __init__(self, device):
        self.made = []

    def mark(self):
        LateDevice.now_ns += 1000
        self.made.append(LateEvent(self.now_ns))
        return self.made[-1]

    def passed_ns(self, event):
        assert event.passed, "this would have waited for the device"
        return event.at_ns


def test_events_of_a_gpu_are_read_after_the_device_has_passed_them(folder, monkeypatch):
    monkeypatch.setattr(event_timer, "DeviceTimes", LateDevice)
    timer = EventTimer(RingWriter(folder, 0, 64), torch.device("cuda"))
    reader = RingReader(folder / "rank0")
    device = timer._device
    with timer.step(1):
        for microbatch in range(2):
            slot = (Action(Op.F, 0, microbatch),)
            timer.slot_begins(slot)
            timer.slot_ended(slot, device.mark(), device.mark())
    assert [event_text(int(word), 0) for word in reader.read()["first"]] == ["step"]
    for event in device.made[:2]:
        event.passed = True
    with timer.step(2):
        pass
    found = reader.read()
    assert [event_text(int(word), 0) for word in found["first"]] == ["0F0", "step"]
    assert found["step"].tolist() == [1, 2] and found["end"][0] - found["start"][0] == pytest.approx(1e-6)


def test_a_timer_states_what_its_events_cost_and_leaves_no_other_trace(tmp_path):
    folder = rings_folder(tmp_path)
    try:
        timer = EventTimer.open(tmp_path, 2, 4, CPU)
        reader = RingReader(folder / "rank2")
        assert sorted(path.name for path in folder.iterdir()) == ["rank2"]
        assert len(reader.read()) == 0 and reader.current()["slot"] == ""
        assert 0.0 < reader.current()["event_s"] < 1.0
        with timer.step(1):
            pass
        assert reader.read()["step"].tolist() == [1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_rings_of_two_runs_lie_apart(tmp_path):
    assert rings_folder(tmp_path / "a") != rings_folder(tmp_path / "b")
    assert rings_folder(tmp_path / "a").parent.name == f"weft-{os.getuid()}"
    assert 8 * HEADER == 128 and WeftConfig().logging.events and COMPUTE
