"""The copy of another host's bubble board: its times, its liveness, and its end."""

import contextlib
import queue
import threading
import time

import pytest

from weft.inference.board.clock_offset import TRIPS, ClockOffset
from weft.inference.board.mirror import BEAT_S, BoardMirror, BoardSource, News, follow_board, serve_board
from weft.inference.board.reader import BoardReader
from weft.inference.board.view import SILENCE_S
from weft.inference.board.writer import BoardWriter

MS = 1_000_000
PATIENCE_S = 20.0


class Stream:
    """One end of a connection within this process. None in a queue ends it."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing

    def send(self, message):
        self.outgoing.put(message)

    def receive(self, *, limit_s, most):
        message = self.incoming.get(timeout=limit_s)
        if message is None:
            raise ConnectionError("closed")
        assert len(message) <= most
        return message


@pytest.fixture
def boards(tmp_path):
    """The path of a rank's board on its host, and of its copy on another."""
    return tmp_path / "there" / "rank0.board", tmp_path / "here" / "rank0.board"


@pytest.fixture
def link(boards):
    """A running copy: the function that cuts it."""
    there, here = boards
    requests, replies = queue.Queue(), queue.Queue()

    def run(function, *args):
        with contextlib.suppress(ConnectionError):
            function(*args)

    mirror = BoardMirror(here)
    follower = threading.Thread(
        target=run, args=(follow_board, Stream(replies, requests), mirror, ClockOffset(), lambda: None)
    )
    server = threading.Thread(target=run, args=(serve_board, Stream(requests, replies), there))
    server.start()
    follower.start()

    def cut():
        requests.put(None)
        server.join()
        replies.put(None)
        follower.join()

    yield cut
    cut()
    mirror.remove()


def eventually(holds):
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def followed(boards):
    """The writer of a board, and the reader of its copy, which is there."""
    there, here = boards
    writer, reader = BoardWriter(there, rank=0, plan=[], max_edges=16), BoardReader(here)
    eventually(lambda: reader.state().alive)
    return writer, reader


def write_steps(writer, count, begin_ns):
    """Steps of 100 ms: idle, 20 ms of work at 30 ms, and work from 90 ms on."""
    for step in range(count):
        at_ns = begin_ns + 100 * MS * step
        writer.begin(7, at_ns)
        writer.busy(at_ns + 30 * MS)
        writer.idle(at_ns + 50 * MS)
        writer.busy(at_ns + 90 * MS)


def copied(source, mirror, offset_ns):
    mirror.apply(source.news(0.0), offset_ns)


def test_a_copy_has_the_steps_and_the_plan_of_the_board_at_times_of_this_host(boards):
    there, here = boards
    writer = BoardWriter(there, rank=5, plan=[(0.03, 0.05), (0.09, 0.1)], max_edges=16)
    begin_ns, offset_ns = time.monotonic_ns(), 3_600_000 * MS
    write_steps(writer, 3, begin_ns)
    source, mirror = BoardSource(there), BoardMirror(here)
    copied(source, mirror, offset_ns)
    reader = BoardReader(here)
    shifted = [[(start - 3600.0, end - 3600.0) for start, end in work] for _, work in BoardReader(there).work()]
    assert [step for step, _ in reader.work()] == [1, 2]
    for (_, ours), theirs in zip(reader.work(), shifted, strict=True):
        assert [time_s for span in ours for time_s in span] == pytest.approx(
            [time_s for span in theirs for time_s in span], abs=1e-6
        )
    assert reader.rank == 5
    assert reader.view.plan == BoardReader(there).view.plan
    mirror.remove()
    writer.close()


def test_marks_arrive_as_they_are_made_and_new_plans_replace_the_copy(boards):
    there, here = boards
    writer = BoardWriter(there, rank=0, plan=[(0.1, 0.2)], max_edges=16)
    source, mirror = BoardSource(there), BoardMirror(here)
    copied(source, mirror, 0)
    reader = BoardReader(here)
    assert reader.state().alive and reader.state().step == 0
    writer.begin(1)
    copied(source, mirror, 0)
    assert reader.state().step == 1 and not reader.state().busy_since_s
    writer.busy()
    copied(source, mirror, 0)
    assert reader.state().busy_since_s == BoardReader(there).state().busy_since_s
    file = reader.view.file
    for _ in range(20):  # more steps than a board records
        write_steps(writer, 1, time.monotonic_ns())
    copied(source, mirror, 0)
    assert reader.state().step == 21
    assert [step for step, _ in reader.work()] == [step for step, _ in BoardReader(there).work()]
    assert reader.view.file != file
    writer.replan([(0.2, 0.3)])
    copied(source, mirror, 0)
    assert reader.view.plan == [0, 200 * MS]
    mirror.remove()
    writer.close()


def test_the_steps_of_the_next_run_are_copied_from_its_first(boards):
    there, here = boards
    first = BoardWriter(there, rank=0, plan=[], max_edges=16)
    source, mirror, reader = BoardSource(there), BoardMirror(here), BoardReader(here)
    write_steps(first, 5, time.monotonic_ns())
    copied(source, mirror, 0)
    assert reader.state().step == 5
    again = BoardWriter(there, rank=0, plan=[], max_edges=16)
    copied(source, mirror, 0)
    assert reader.state().step == 0
    again.begin(1)
    copied(source, mirror, 0)
    assert reader.state().step == 1
    mirror.remove()
    first.close()
    again.close()


def test_an_idle_rank_wakes_readers_of_the_copy(boards, link):
    writer, reader = followed(boards)
    writer.begin(1)
    writer.busy()
    eventually(lambda: reader.state().busy_since_s)
    state = reader.state()
    writer.idle()
    reader.wait(state, PATIENCE_S)
    assert not reader.state().busy_since_s
    writer.close()


def test_a_copy_looks_dead_soon_after_the_connection_is_lost_but_not_ended(boards, link):
    writer, reader = followed(boards)
    writer.begin(1)
    eventually(lambda: reader.state().step == 1)
    link()
    cut_s = time.monotonic()
    eventually(lambda: not reader.state().alive)
    assert time.monotonic() - cut_s < 20 * (SILENCE_S + BEAT_S)
    assert not reader.ended and "silent" in reader.state().why_not
    writer.close()


def test_a_copy_stays_alive_while_its_rank_marks_nothing(boards, link):
    writer, reader = followed(boards)
    time.sleep(3 * SILENCE_S)
    eventually(lambda: reader.state().alive)
    writer.close()


def test_a_copy_ends_with_training_and_follows_the_next_run(boards, link):
    there, here = boards
    writer, reader = followed(boards)
    writer.close()
    eventually(lambda: reader.ended)
    assert not here.exists() and not reader.state().alive
    again = BoardWriter(there, rank=0, plan=[], max_edges=32)
    again.begin(1)
    eventually(lambda: reader.state().step == 1)
    assert not reader.ended
    again.close()


def test_news_without_a_board_make_no_copy(boards):
    _, here = boards
    BoardMirror(here).apply(News(is_alive=False, ended=False), 0)
    assert not here.exists()


def test_the_shortest_round_trip_gives_the_offset():
    offset = ClockOffset()
    there_ns = 5_000_000 * MS
    offset.add(0, there_ns + 40 * MS, there_ns + 50 * MS, 60 * MS)  # 40 ms there, 10 ms back
    assert offset.here_s(there_ns / 1e9) == pytest.approx(-0.015)
    offset.add(100 * MS, there_ns + 101 * MS, there_ns + 140 * MS, 141 * MS)
    offset.add(200 * MS, there_ns + 230 * MS, there_ns + 231 * MS, 233 * MS)
    assert offset.ns == there_ns
    assert offset.here_s((there_ns + 7 * MS) / 1e9) == pytest.approx(0.007)


def test_old_round_trips_are_forgotten_because_clocks_drift():
    offset = ClockOffset()
    offset.add(0, 10, 10, 2)
    for _ in range(TRIPS):
        offset.add(0, 30, 30, 4)
    assert offset.ns == 28
