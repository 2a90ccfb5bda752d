"""Tests of a reader with given times, to the nanosecond, by a clock that the test sets."""

import os
import threading
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.conf.host.shared_words import WORD_BYTES
from weft.inference.board import reader as reading
from weft.inference.board.forecast import Forecast, forecast, planned
from weft.inference.board.layout import HEADER, MAGIC, ROW_HEADER, ROWS, VERSION, Header, map_board, row_at
from weft.inference.board.reader import BoardReader, Bubble
from weft.inference.board.view import SILENCE_S, BoardView
from weft.inference.board.writer import WAKING_GAP_NS, BoardWriter, board_path

BEGIN_S = 2**32
"""So late that a factor that is off by a thousand-millionth is off by seconds; floats hold eighths of it exactly."""


@pytest.fixture
def writer(tmp_path):
    writer = BoardWriter(board_path(tmp_path / "boards", 3), rank=3, plan=[(1.0, 2.0), (5.0, 6.0)], max_edges=16)
    writer._closing.set()  # no heartbeat comes but the tests'
    yield writer
    writer.close()


def ns(time_s):
    return round((BEGIN_S + time_s) * 10**9)


def step(writer, begin_s, edges_s, kind=8):
    """A step whose marks alternate between busy and idle."""
    writer.begin(kind, ns(begin_s))
    for number, edge_s in enumerate(edges_s):
        (writer.idle if number % 2 else writer.busy)(ns(begin_s + edge_s))


def at(monkeypatch, writer, time_s):
    writer._words[Header.HEARTBEAT] = ns(time_s)
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: BEGIN_S + time_s, sleep=None))


def told(spans):
    return [(start_s - BEGIN_S, end_s - BEGIN_S) for start_s, end_s in spans]


def test_the_open_bubble_closes_at_the_earliest_that_it_has(writer, monkeypatch):
    """From the step's begin, or from its own, whichever is sooner."""
    reader = BoardReader(writer.path)
    step(writer, 0.0, [2.0, 3.0, 6.0])
    step(writer, 10.0, [2.5, 3.0, 5.5])
    step(writer, 20.0, [2.25, 4.0])
    at(monkeypatch, writer, 24.5)
    state = reader.state()
    assert state.bubble == Bubble(3, 1, BEGIN_S + 24.0, BEGIN_S + 25.5)
    assert (state.step, state.busy_since_s, state.now_s) == (3, 0.0, BEGIN_S + 24.5)
    at(monkeypatch, writer, 25.5)
    assert reader.state().bubble is None, "it should have closed"


def test_a_board_that_is_busy_says_since_when(writer, monkeypatch):
    reader = BoardReader(writer.path)
    step(writer, 0.0, [2.0, 3.0, 6.0])
    at(monkeypatch, writer, 7.0)
    state = reader.state()
    assert (state.step, state.busy_since_s, state.bubble) == (1, BEGIN_S + 6.0, None)


@pytest.mark.parametrize("measured", range(4))
def test_a_bubble_is_granted_once_two_steps_were_measured(writer, monkeypatch, measured):
    reader = BoardReader(writer.path)
    for number in range(measured):
        step(writer, 10.0 * number, [2.0, 3.0, 6.0])
    step(writer, 10.0 * measured, [])
    at(monkeypatch, writer, 10.0 * measured + 1.0)
    assert (reader.state().bubble is not None) == (measured >= 2)


def test_bubbles_to_come_are_where_they_were(writer, monkeypatch):
    reader = BoardReader(writer.path)
    for number in range(3):
        step(writer, 10.0 * number, [2.0, 3.0, 6.0])
    step(writer, 30.0, [2.0])
    at(monkeypatch, writer, 32.5)
    assert told(reader.upcoming(9.0)) == [(33.0, 36.0), (40.0, 42.0)]
    assert told(reader.upcoming(7.5)) == [(33.0, 36.0)]


def test_the_plan_is_what_comes_before_a_step_was_measured(writer, monkeypatch):
    reader = BoardReader(writer.path)
    step(writer, 0.0, [])
    at(monkeypatch, writer, 0.5)
    assert told(reader.upcoming(100.0)) == [(0.5, 1.0), (2.0, 5.0)]


def test_work_lies_between_marks(writer):
    reader = BoardReader(writer.path)
    step(writer, 0.0, [2.0, 3.0, 6.0])
    step(writer, 10.0, [2.5, 4.0, 7.0])
    ((number, work),) = reader.work()
    assert number == 1 and told(work) == [(2.0, 3.0), (6.0, 10.0)]
    assert reader.busy_from(BEGIN_S + 10.0, BEGIN_S + 12.5) is None
    assert reader.busy_from(BEGIN_S + 10.0, BEGIN_S + 13.0) == BEGIN_S + 12.5
    assert reader.busy_from(BEGIN_S + 3.0, BEGIN_S + 6.0) is None
    assert reader.busy_from(BEGIN_S + 2.5, BEGIN_S + 6.0) == BEGIN_S + 2.5
    assert reader.busy_from(BEGIN_S + 99.0, BEGIN_S + 100.0) == BEGIN_S + 99.0, "what has not ended goes on"
    assert reader.busy_from(BEGIN_S + 99.0, inf) == BEGIN_S + 99.0


def test_the_writers_process_is_published(writer):
    reader = BoardReader(writer.path)
    assert (reader.writer, reader.rank) == (os.getpid(), 3)
    view = BoardView(writer.path)
    writer.close()
    assert view.writer == 0 and "training has ended" in view.why_dead(0.0)
    nobody = BoardReader(writer.path)
    assert (nobody.writer, nobody.rank) == (None, None)


def words_of(writer):
    memory, _ = map_board(writer.path)
    return memoryview(memory).cast("Q")


@pytest.mark.parametrize("marks", range(4))
def test_a_mark_is_as_good_as_a_heartbeat(writer, marks):
    """A busy trainer may not come to beat; what it has marked last shows that it lives."""
    words = words_of(writer)
    step(writer, 0.0, [1.0, 2.0, 3.0][:marks])
    words[Header.HEARTBEAT] = ns(-9.0)
    words[Header.STARTED] += 1  # so that who is asked for is dead
    view = BoardView(writer.path)
    last_s = BEGIN_S + float(marks)
    assert view.why_dead(last_s + SILENCE_S) == ""
    assert "is dead" in view.why_dead(last_s + SILENCE_S + 0.01)
    words[Header.HEARTBEAT] = ns(marks + 5.0)
    assert view.why_dead(last_s + 5.0 + SILENCE_S) == ""
    words[Header.STARTED] -= 1
    assert "has been silent for 2.0 s" in view.why_dead(last_s + 7.0)


@pytest.mark.parametrize(("words", "said"), [(HEADER - 1, "too few"), (HEADER, "not a bubble board of version")])
def test_a_file_that_is_no_board_is_said_to_be_none(tmp_path, words, said):
    folder = tmp_path / "boards"
    folder.mkdir(mode=0o700)
    path = board_path(folder, 0)
    path.write_bytes(bytes(words * WORD_BYTES))
    path.chmod(0o600)
    assert said in BoardReader(path).state().why_not
    with pytest.raises(ValueError, match=said):
        map_board(path)


@pytest.mark.parametrize("word", [Header.MAGIC, Header.VERSION])
def test_magic_and_version_have_to_be_right(writer, word):
    words = words_of(writer)
    assert (words[Header.MAGIC], words[Header.VERSION]) == (MAGIC, VERSION)
    words[word] += 1
    assert "the same Weft" in BoardReader(writer.path).state().why_not


@pytest.mark.parametrize(("gap_ns", "wakes"), [(WAKING_GAP_NS - 1, False), (WAKING_GAP_NS, True)])
def test_readers_are_woken_for_bubbles_that_were_long_enough(writer, gap_ns, wakes):
    """And for those that there was none of before."""
    words = words_of(writer)

    def rings(act, *args):
        before = words[Header.BELL]
        act(*args)
        return words[Header.BELL] != before

    step(writer, 0.0, [])
    writer.busy(ns(0.0) + gap_ns)
    assert rings(writer.idle, ns(1.0))
    writer.busy(ns(1.0) + gap_ns)
    assert rings(writer.begin, 8, ns(2.0)) == wakes
    assert not rings(writer.busy, ns(3.0))
    assert rings(writer.idle, ns(3.5)) == wakes
    assert not rings(writer.busy, ns(4.0))
    assert rings(writer.idle, ns(4.5)), "a second one is new"


measured = st.lists(st.lists(st.floats(0.0, 9.0), min_size=5, max_size=5).map(sorted), min_size=1, max_size=6)


@given(measured, st.integers(0, 4), st.floats(0.0, 9.0))
def test_a_bubble_closes_as_soon_as_it_ever_has(steps, edge, at_s):
    found = forecast(steps, [0.0])
    expected = None
    if edge < 4:
        expected = min(min(row[edge + 1] for row in steps), at_s + min(row[edge + 1] - row[edge] for row in steps))
    assert found.closes_s(edge, at_s) == expected
    assert found.num_steps == len(steps) and found.period_s == 0.0
    assert found.shortest_s[0] == 0.0 and len(found.shortest_s) == 5


def test_a_period_is_the_median_of_those_between_begins():
    assert forecast([[0.0, 1.0]], [5.0, 6.0, 16.0, 18.0]).period_s == 2.0
    assert planned([0.0, 1.0, 4.0], 7.0) == Forecast((0.0, 1.0, 4.0), (0.0, 1.0, 4.0), (0.0, 1.0, 3.0), 7.0, 0)
    assert planned([]) == Forecast((), (), (), 0.0, 0) and list(planned([]).bubbles(0, 0.0, 0.0, 9.0)) == []


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6).map(sorted),
    st.integers(0, 8),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 90),
    st.sampled_from([0, 21, 40]),
)
def test_foretold_bubbles_are_the_plans_moved_to_where_the_step_is(edges, edge, at, more, horizon, period):
    """As late as its last mark, later still where the next should have come, and as the last mark is where there is
    none of that number; in whole seconds, which floats hold."""
    now, last = at + more, min(edge, len(edges) - 1)
    shift = at - edges[last]
    if last + 1 < len(edges):
        shift = max(shift, now - edges[last + 1])
    expected = []
    for number in range(200 if period else 1):
        for opens, closes in zip(edges[::2], edges[1::2], strict=False):
            start, end = (each + shift + number * period for each in (opens, closes))
            if max(start, now) < min(end, now + horizon) and shift + number * period < now + horizon:
                expected.append((max(start, now), end))
    found = planned([float(each) for each in edges], float(period)).bubbles(
        edge, float(at), float(now), float(now + horizon)
    )
    assert list(found) == expected


def test_nothing_is_granted_by_a_board_whose_writer_is_dead(writer, monkeypatch):
    reader = BoardReader(writer.path)
    for number in range(3):
        step(writer, 10.0 * number, [2.0, 3.0, 6.0])
    step(writer, 30.0, [])
    at(monkeypatch, writer, 31.0)
    assert reader.state().bubble and reader.upcoming(9.0)
    writer._words[Header.HEARTBEAT] = ns(30.0)
    state = reader.state()
    assert (state.alive, state.step, state.busy_since_s, state.bubble) == (False, 0, 0.0, None)
    assert "silent" in state.why_not and reader.upcoming(9.0) == []


@pytest.mark.parametrize("works", range(3))
def test_the_header_says_how_many_edges_are_planned(tmp_path, works):
    plan = [(2.0 * number + 1.0, 2.0 * number + 2.0) for number in range(works)]
    writer = BoardWriter(board_path(tmp_path / "boards", 0), rank=0, plan=plan, max_edges=16)
    words = words_of(writer)
    edges = [0, *(round(edge * 1e9) for work in plan for edge in work)][: 2 * works]
    assert words[Header.PLANNED] == len(edges)
    assert words[HEADER : HEADER + 16].tolist() == edges + [0] * (16 - len(edges)), "the last ends with the step"
    writer.close()


def test_marks_that_do_not_fit_touch_no_other_row(writer):
    words = words_of(writer)
    for number in range(ROWS):
        step(writer, 100.0 * number, [float(mark) for mark in range(1, 16)])
    before = words.tolist()
    row = row_at(ROWS, ROWS, 16)
    assert before[row + ROW_HEADER : row + ROW_HEADER + 16] == [ns(100.0 * (ROWS - 1) + mark) for mark in range(16)]
    for mark in range(16, 20):
        writer.idle(ns(mark))
        writer.busy(ns(mark))
    changed = [index for index, (old, new) in enumerate(zip(before, words.tolist(), strict=True)) if old != new]
    assert set(changed) <= {Header.BELL}


def test_a_closed_board_beats_no_more(tmp_path):
    before = set(threading.enumerate())
    writer = BoardWriter(board_path(tmp_path / "boards", 0), rank=0, plan=[], max_edges=4)
    (beating,) = set(threading.enumerate()) - before
    writer.close()
    beating.join(20.0)
    assert not beating.is_alive()
