"""The bubble board: what a reader learns, whatever the writer does."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.inference.board import BoardWriter, board_path
from weft.inference.board_layout import H_VERSION, R_GENERATION, WORD_BYTES, map_board, row_at
from weft.inference.board_reader import BoardReader
from weft.inference.forecast import forecast, planned


@pytest.fixture
def path(tmp_path):
    return board_path(tmp_path / "boards", 3)


@pytest.fixture
def writer(path):
    writer = BoardWriter(path, rank=3, plan=[(0.1, 0.2), (0.5, 0.6)], max_edges=16)
    yield writer
    writer.close()


def one_step(writer, works=2, pause_s=0.003):
    writer.begin(8)
    for _ in range(works):
        time.sleep(pause_s)
        writer.busy()
        writer.idle()
    time.sleep(pause_s)
    writer.busy()


def test_only_the_owner_can_open_it(writer, path):
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_board_that_others_could_write_is_not_read(writer, path):
    path.chmod(0o660)
    state = BoardReader(path).state()
    assert not state.alive
    assert "this user alone" in state.why_not


def test_a_folder_that_others_could_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="chmod 700"):
        BoardWriter(board_path(tmp_path, 0), rank=0, plan=[], max_edges=4)


def test_another_version_is_not_read(writer, path):
    memory, _ = map_board(path)
    memoryview(memory).cast("Q")[H_VERSION] = 99
    assert "the same Weft" in BoardReader(path).state().why_not


def test_nothing_is_granted_on_a_plan_alone_but_it_is_foretold(writer, path):
    reader = BoardReader(path)
    writer.begin(8)
    state = reader.state()
    assert state.alive and state.step == 1 and state.bubble is None
    begin_s = state.now_s
    first, second = reader.upcoming(10.0)
    assert first[1] - begin_s == pytest.approx(0.1, abs=0.05)
    assert second[1] - second[0] == pytest.approx(0.3)


def test_an_open_bubble_closes_when_it_closed_before(writer, path):
    reader = BoardReader(path)
    for _ in range(3):
        one_step(writer, pause_s=0.02)
        state = reader.state()
        assert state.bubble is None and state.busy_since_s
    writer.begin(8)
    bubble = reader.state().bubble
    assert bubble is not None and bubble.index == 0 and bubble.step == 4
    assert bubble.closes_s - bubble.opens_s >= 0.02
    spans = reader.upcoming(1.0)
    assert all(end > start for start, end in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_measured_work_is_what_was_marked(writer, path):
    reader = BoardReader(path)
    for _ in range(3):
        one_step(writer)
    steps = reader.work()
    assert [step for step, _ in steps] == [1, 2]
    assert all(len(work) == 3 for _, work in steps)
    times = [time_s for _, work in steps for span in work for time_s in span]
    assert times == sorted(times)


def test_only_steps_of_one_kind_are_compared(writer, path):
    reader = BoardReader(path)
    for _ in range(3):
        one_step(writer)
    writer.begin(4)
    assert reader.state().bubble is None


def test_marks_may_be_nested_and_too_many(writer, path):
    reader = BoardReader(path)
    for _ in range(3):
        writer.begin(8)
        writer.busy()
        writer.busy()
        for _ in range(50):
            writer.idle()
            writer.idle()
            writer.busy()
    assert reader.state().bubble is None
    assert all(len(work) <= 8 for _, work in reader.work())


def test_more_bubbles_than_before_are_not_granted(writer, path):
    reader = BoardReader(path)
    for _ in range(3):
        one_step(writer)
    one_step(writer)
    writer.idle()
    assert reader.state().bubble is None


def test_a_waiting_reader_is_woken(writer, path):
    reader = BoardReader(path)
    state = reader.state()
    timer = threading.Timer(0.05, writer.begin, (8,))
    timer.start()
    reader.wait(state, 30.0)
    timer.join()
    assert reader.state().step == 1


def test_a_wake_between_reading_and_waiting_is_not_lost(writer, path):
    reader = BoardReader(path)
    state = reader.state()
    writer.begin(8)
    reader.wait(state, 30.0)


def test_a_board_that_is_deleted_replaced_or_late(path):
    reader = BoardReader(path)
    assert not reader.state().alive and reader.upcoming(1.0) == []
    first = BoardWriter(path, rank=0, plan=[], max_edges=4)
    assert reader.state().alive
    path.unlink()
    assert "gone" in reader.state().why_not
    first.begin(1)
    second = BoardWriter(path, rank=1, plan=[], max_edges=4)
    assert reader.state().alive and reader.rank == 1
    second.close()
    first.close()
    assert not reader.state().alive


WRITER = """
import sys, time
from pathlib import Path
from weft.inference.board import BoardWriter
writer = BoardWriter(Path(sys.argv[1]), rank=0, plan=[], max_edges=8)
writer.begin(1)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("blow", "word"), [(signal.SIGKILL, "dead"), (signal.SIGSTOP, "silent")])
def test_a_writer_that_dies_or_stops_is_recognised(path, blow, word):
    path.parent.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
            reader = BoardReader(path)
            assert reader.state().alive
            child.send_signal(blow)
            if blow is signal.SIGKILL:
                child.wait()
            deadline = time.monotonic() + 10
            while reader.state().alive and time.monotonic() < deadline:
                time.sleep(0.02)
            assert word in reader.state().why_not
        finally:
            child.kill()


def test_a_row_that_is_being_rewritten_is_not_read(writer, path):
    one_step(writer)
    memory, _ = map_board(path)
    words = memoryview(memory).cast("Q")
    reader = BoardReader(path)
    rows, edges = words[2], words[3]
    words[row_at(1, rows, edges) + R_GENERATION] += 1
    assert reader.state().step == 0 and reader.state().bubble is None


def test_readers_never_see_a_torn_step(writer, path):
    reader = BoardReader(path)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            writer.begin(8)
            for _ in range(6):
                writer.busy()
                writer.idle()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            state = reader.state()
            assert state.alive
            assert state.busy_since_s <= state.now_s + 0.001
            for _, work in reader.work():
                times = [time_s for span in work for time_s in span]
                assert times == sorted(times)
    finally:
        stop.set()
        thread.join()


def test_the_file_holds_what_its_header_says(writer, path):
    assert os.stat(path).st_size % WORD_BYTES == 0


edges = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=9).map(
    lambda gaps: list(itertools.accumulate([0.0, *gaps]))
)


@given(edges, st.lists(st.floats(0.5, 2.0), min_size=1, max_size=7), st.floats(0.0, 1.0))
def test_a_bubble_is_never_foretold_longer_than_the_shortest_seen(step, factors, at_share):
    steps = [[edge * factor for edge in step] for factor in factors]
    found = forecast(steps, [0.0])
    for edge in range(0, len(step) - 1, 2):
        at_s = at_share * step[edge + 1]
        closes_s = found.closes_s(edge, at_s)
        assert closes_s is not None
        assert closes_s <= min(row[edge + 1] for row in steps) + 1e-12
        assert closes_s - at_s <= min(row[edge + 1] - row[edge] for row in steps) + 1e-12
    assert found.closes_s(len(step) - 1, step[-1]) is None


@given(edges, st.floats(0.0, 3.0), st.floats(0.1, 20.0))
def test_foretold_bubbles_are_in_order_and_in_the_future(step, now_s, horizon_s):
    found = planned(step, period_s=step[-1] + 0.1)
    spans = list(found.bubbles(0, 0.0, now_s, now_s + horizon_s))
    times = [time_s for span in spans for time_s in span]
    assert times == sorted(times)
    assert all(start_s >= now_s and end_s > start_s for start_s, end_s in spans)
