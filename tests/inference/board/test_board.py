"""The bubble board: what a reader learns, whatever the writer does."""

import itertools
import os
import shutil
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inference.board.common_bubbles import CommonBubbles
from weft.inference.board.forecast import forecast, planned
from weft.inference.board.layout import ROWS, Header, RowHeader, map_board, num_words, row_at
from weft.inference.board.reader import BoardReader
from weft.inference.board.view import BoardView
from weft.inference.board.writer import BoardWriter, board_path


@pytest.fixture
def path(tmp_path):
    return board_path(tmp_path / "boards", 3)


@pytest.fixture
def writer(path):
    writer = BoardWriter(path, rank=3, plan=[(0.1, 0.2), (0.5, 0.6)], max_edges=16)
    yield writer
    writer.close()


@pytest.fixture
def reader(writer, path):
    return BoardReader(path)


def run_steps(writer, count=3, works=2, pause_s=0.003):
    for _ in range(count):
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
    assert "not private to this user" in state.why_not


def test_a_folder_that_others_could_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="chmod 700"):
        BoardWriter(board_path(tmp_path, 0), rank=0, plan=[], max_edges=4)


def test_another_version_is_not_read(writer, path):
    memory, _ = map_board(path)
    memoryview(memory).cast("Q")[Header.VERSION] = 99
    assert "the same Weft" in BoardReader(path).state().why_not


def test_nothing_is_granted_on_a_plan_alone_but_it_is_foretold(writer, reader):
    writer.begin(8)
    state = reader.state()
    assert state.alive and state.step == 1 and state.bubble is None
    begin_s = state.now_s
    first, second = reader.upcoming(10.0)
    assert first[1] - begin_s == pytest.approx(0.1, abs=0.05)
    assert second[1] - second[0] == pytest.approx(0.3)


def test_an_open_bubble_closes_when_it_closed_before(writer, reader):
    for _ in range(3):
        run_steps(writer, 1, pause_s=0.1)
        state = reader.state()
        assert state.bubble is None and state.busy_since_s
    writer.begin(8)
    bubble = reader.state().bubble
    assert bubble is not None and bubble.index == 0 and bubble.step == 4
    assert bubble.closes_s - bubble.opens_s >= 0.1
    spans = reader.upcoming(1.0)
    assert len(spans) > 3
    assert all(end > start for start, end in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_measured_work_is_what_was_marked(writer, reader):
    run_steps(writer)
    steps = reader.work()
    assert [step for step, _ in steps] == [1, 2]
    assert all(len(work) == 3 for _, work in steps)
    times = [time_s for _, work in steps for span in work for time_s in span]
    assert times == sorted(times)


def test_only_steps_of_one_kind_are_compared(writer, reader):
    run_steps(writer)
    writer.begin(4)
    assert reader.state().bubble is None


def test_after_another_plan_only_its_steps_predict(writer, reader):
    run_steps(writer)
    writer.replan([(0.4, 0.5), (0.7, 0.8)])
    writer.begin(8)
    state = reader.state()
    assert state.bubble is None and reader.upcoming(10.0)[0][1] - state.now_s == pytest.approx(0.4, abs=0.05)
    run_steps(writer, pause_s=0.1)  # longer than a busy host takes from here to the board's state
    writer.begin(8)
    assert reader.state().bubble is not None


def test_marks_may_be_nested_and_too_many(writer, reader):
    for _ in range(3):
        writer.begin(8)
        writer.busy()
        writer.busy()
        for _ in range(50):
            writer.idle()
            writer.idle()
            writer.busy()
    assert reader.state().bubble is None
    assert [len(work) for _, work in reader.work()] == [8, 8], "of 16 marks the first is the step's begin"


def test_more_bubbles_than_before_are_not_granted(writer, reader):
    run_steps(writer)
    run_steps(writer, 1)
    writer.idle()
    assert reader.state().bubble is None


def waits_for_ever(reader, state):
    """True if a reader still sleeps when everything that could wake it has long happened."""
    thread = threading.Thread(target=reader.wait, args=(state, 3600.0), daemon=True)
    thread.start()
    thread.join(20.0)
    return thread.is_alive()


def test_a_waiting_reader_is_woken(writer, reader):
    timer = threading.Timer(0.2, writer.begin, (8,))  # the reader sleeps by then, or finds that the word has changed
    timer.start()
    assert not waits_for_ever(reader, reader.state())
    timer.join()
    assert reader.state().step == 1


def test_a_wake_between_reading_and_waiting_is_not_lost(writer, reader):
    state = reader.state()
    writer.begin(8)
    assert not waits_for_ever(reader, state)


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


def test_threads_that_share_a_reader_outlive_boards_that_come_and_go(path):
    """A waker and an engine read one board while training is started again and again."""
    reader = BoardReader(path)
    stop, errors, seen = threading.Event(), [], set()

    def read():
        try:
            while not stop.is_set():
                state = reader.state()
                seen.add(reader.rank)
                reader.work()
                reader.upcoming(1.0)
                reader.wait(state, 0.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30.0
        for number in range(300):
            writer = BoardWriter(path, rank=number, plan=[], max_edges=4 + number % 9)
            for _ in range(3):
                writer.begin(1)
                writer.busy()
            writer.close()
            if errors or time.monotonic() > deadline:
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval_s)
    assert not errors
    assert len(seen) > 2


def test_a_row_that_is_being_rewritten_is_not_read(writer, path):
    run_steps(writer, 1)
    memory, _ = map_board(path)
    words = memoryview(memory).cast("Q")
    reader = BoardReader(path)
    rows, edges = words[2], words[3]
    words[row_at(1, rows, edges) + RowHeader.GENERATION] += 1
    assert reader.state().step == 0 and reader.state().bubble is None


def test_a_row_that_is_rewritten_while_it_is_read_is_not_taken(writer, path):
    """The writer laps the ring between the look at a row's number and that at its edges."""
    run_steps(writer, works=1, pause_s=0.0)
    view = BoardView(path)

    class Meddled:
        """The board's words; the first piece of it that is read is another step's by then."""

        def __init__(self, words):
            self.words, self.laps = words, 1

        def __getitem__(self, key):
            if isinstance(key, slice) and self.laps:
                self.laps -= 1
                run_steps(writer, ROWS, works=3, pause_s=0.0)
            return self.words[key]

    before = view.running()
    view._words = Meddled(view._words)
    after = view.running()
    assert before.step == 3 and not view._words.laps
    assert after is None or (after.step, after.edges) == (before.step, before.edges)
    assert view.running().step == 3 + ROWS


def test_readers_never_see_a_torn_step(writer, reader):
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
        read = 0
        for _ in range(2000):
            state = reader.state()
            assert state.alive
            assert state.busy_since_s <= time.monotonic(), "on one processor the writer may go on in between"
            for _, work in reader.work():
                read += 1
                times = [time_s for span in work for time_s in span]
                assert len(work) == 6
                assert times == sorted(times)
        assert read
    finally:
        stop.set()
        thread.join()


def test_the_file_holds_what_its_header_says(writer, path):
    memory, _ = map_board(path)
    words = memoryview(memory).cast("Q")
    assert words[Header.ROWS] == ROWS and words[Header.EDGES] == 16
    assert os.stat(path).st_size == 8 * num_words(words[Header.ROWS], words[Header.EDGES])


@pytest.mark.parametrize(
    ("word", "value"), [(Header.ROWS, 0), (Header.ROWS, ROWS + 1), (Header.EDGES, 2**63), (Header.EDGES, 0)]
)
def test_a_header_that_does_not_fit_the_file_is_named(writer, path, word, value):
    memory, _ = map_board(path)
    memoryview(memory).cast("Q")[word] = value
    assert "its header says" in BoardReader(path).state().why_not


def test_work_is_found_while_it_goes_on_and_after_it_has_ended(writer, reader):
    begin_s = time.monotonic()
    assert reader.busy_from(begin_s, begin_s + 60) is None
    run_steps(writer, 1)
    assert reader.busy_from(begin_s, time.monotonic()) is not None
    writer.begin(8)
    (_, work) = reader.work()[0]
    for start_s, end_s in work:
        assert reader.busy_from(start_s - 1e-9, end_s) == pytest.approx(start_s, abs=1e-6)
        assert reader.busy_from((start_s + end_s) / 2, end_s) == pytest.approx((start_s + end_s) / 2)
    assert reader.busy_from(work[0][1], work[1][0]) is None
    assert reader.busy_from(begin_s, begin_s + 60) == pytest.approx(work[0][0])


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


@given(works=st.integers(0, 12), max_edges=st.integers(0, 30))
@settings(deadline=None, max_examples=30)
def test_a_board_holds_its_whole_plan(tmp_path_factory, works, max_edges):
    """However few marks are asked for: every planned bubble is predicted, and a step like the plan is recorded."""
    path = board_path(tmp_path_factory.mktemp("boards") / "boards", 0)
    plan = [(number + 0.5, number + 1.0) for number in range(works)]
    writer = BoardWriter(path, rank=0, plan=plan, max_edges=max_edges)
    try:
        reader = BoardReader(path)
        assert reader.state().step == 0 and reader.state().busy_since_s == 0.0
        writer.begin(1)
        assert len(reader.upcoming(100.0)) == works
        for _ in plan:
            writer.busy()
            writer.idle()
        writer.begin(1)
        ((step, work),) = reader.work()
        assert step == 1 and len(work) == works
    finally:
        writer.close()


def test_a_removed_board_returns_with_the_next_step(tmp_path):
    """With its folder, too; and readers that knew the old file see the new steps."""
    path = board_path(tmp_path / "boards", 0)
    writer = BoardWriter(path, rank=3, plan=[(0.0, 1.0)], max_edges=8)
    reader = BoardReader(path)
    for _ in range(3):
        writer.begin(1)
        writer.busy()
    assert reader.state().step == 3
    shutil.rmtree(path.parent)
    assert not reader.state().alive and not reader.ended
    deadline = time.monotonic() + 30.0
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        writer.begin(1)
        writer.busy()
    state = reader.state()
    assert state.alive and state.step > 3 and reader.rank == 3
    assert len(reader.work()) > 2, "with the steps from before"
    assert path.stat().st_mode & 0o077 == 0
    writer.close()
    assert not path.exists() and reader.ended


def test_a_board_has_ended_only_when_its_writer_has(tmp_path):
    path = board_path(tmp_path / "boards", 0)
    assert not BoardReader(path).ended, "training has not begun"
    writer = BoardWriter(path, rank=0, plan=[], max_edges=8)
    reader = BoardReader(path)
    bubbles = CommonBubbles([reader])
    assert not reader.ended and bubbles.upcoming(1.0) == []
    writer.close()
    assert reader.ended and bubbles.upcoming(1.0) is None
    again = BoardWriter(path, rank=0, plan=[], max_edges=8)
    assert not reader.ended
    again.close()
