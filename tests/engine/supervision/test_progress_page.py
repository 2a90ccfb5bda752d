"""Places in shared memory: written by ranks, read from outside."""

import itertools
import os
import random
import signal
import subprocess
import sys
from time import monotonic_ns, sleep

import pytest

from tests.waiting import until
from weft.conf.host.processes import STOPPED, process_state
from weft.engine.observability.watcher import Phase, watcher_of
from weft.engine.supervision.messages import LinkReading, RowProgress
from weft.engine.supervision.progress_page import MOST_LINKS, ProgressReader, make_page, progress_of
from weft.engine.supervision.rank.agent_link import Heartbeat, ProgressObserver
from weft.pipeline.action import Action, Op

F, RECV = (Action(Op.F, 0, 0),), (Action(Op.RECV_F, 1, 0),)
LIMIT_S = 60.0


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "private" / "page"
    make_page(path, 3)
    return path


@pytest.fixture
def writer(page):
    heartbeat = Heartbeat(page, local_rank=1, rank=7, attempt=4)
    yield heartbeat
    heartbeat.close()


def test_a_reader_follows_a_step(page, writer):
    reader = ProgressReader(page)
    assert len(reader) == 3
    assert reader.read(0) is None and reader.read(2) is None
    fresh = reader.read(1)
    assert (fresh.attempt, fresh.rank, fresh.phase, fresh.progress) == (4, 7, Phase.setup, RowProgress(0))
    assert (fresh.pid, fresh.started) == (os.getpid(), process_state(os.getpid()).started)
    writer.enter(Phase.steady)
    seen = []

    def look():
        seen.append(reader.read(1).progress)

    observer = ProgressObserver(writer, lambda: 11, lambda: True)
    observer.step_begins(8)
    look()
    for slot in (RECV, F):
        observer.slot_begins(slot)
        look()
        observer.slot_ends(slot)
        look()
    expected = [(12, 0, False), (12, 0, True), (12, 1, False), (12, 1, True), (12, 2, False)]
    assert seen == [RowProgress(*each) for each in expected]
    assert seen == sorted(seen)
    found = reader.read(1)
    assert (found.phase, found.num_microbatches, found.busy_ns) == (Phase.steady, 8, 0)
    assert found.moved_ns <= monotonic_ns()


def test_a_step_of_an_adapted_schedule_has_no_number_that_would_name_the_plans_rows(page, writer):
    reader = ProgressReader(page)
    planned = iter((True, False))
    observer = ProgressObserver(writer, lambda: 11, lambda: next(planned))
    for number in (8, 0):
        observer.step_begins(8)
        assert reader.read(1).num_microbatches == number


def test_only_computations_count_as_busy(page, writer):
    writer.begin_step(1, 2)
    writer.slot_begins(RECV)
    sleep(0.02)
    writer.slot_ends(RECV)
    writer.slot_begins(F)
    sleep(0.01)
    between = monotonic_ns()
    writer.slot_ends(F)
    writer.begin_step(2, 2)
    found = ProgressReader(page).read(1)
    assert found.measured_steps == 1
    assert 10_000_000 <= found.busy_ns <= found.moved_ns - between + 10_000_000 + LIMIT_S * 1e9


def test_waits_count_once_however_they_are_nested(page, writer):
    reader = ProgressReader(page)
    writer.begin_step(1, 2)
    writer.slot_begins(F)
    writer.begin_wait()
    writer.begin_wait()
    assert reader.read(1).progress == RowProgress(1, 0, True, 1)
    writer.end_wait()
    assert reader.read(1).progress == RowProgress(1, 0, True, 1)
    writer.end_wait()
    assert reader.read(1).progress == RowProgress(1, 0, True, 2)
    writer.slot_ends(F)
    assert reader.read(1).progress == RowProgress(1, 1, False, 0)
    writer.begin_wait()
    assert reader.read(1).progress == RowProgress(1, 1, False, 1)


def test_a_phase_after_a_step_is_progress(page, writer):
    reader = ProgressReader(page)
    writer.begin_step(1, 2)
    writer.slot_begins(F)
    writer.slot_ends(F)
    writer.enter(Phase.checkpoint)
    writer.begin_wait()
    assert reader.read(1).progress == RowProgress(1, 1, False, 3)
    assert reader.read(1).phase is Phase.checkpoint


def test_very_many_waits_still_tell_waiting_from_work(page, writer):
    reader = ProgressReader(page)
    writer.begin_step(9, 2)
    writer.slot_begins(F)
    for _ in range(5000):
        writer.begin_wait()
        assert reader.read(1).progress[:3] == (9, 0, True)
        assert reader.read(1).progress.waits % 2 == 1
        writer.end_wait()
        assert reader.read(1).progress.waits % 2 == 0


def test_words_compare_as_places_do():
    rng = random.Random(3)
    words = [rng.getrandbits(64) for _ in range(300)]
    assert sorted(words) == sorted(words, key=progress_of)


def test_another_attempt_begins_anew_in_the_same_process(page, writer):
    writer.begin_step(5, 2)
    writer.slot_begins(F)
    writer.gauge_device(lambda: 1)
    writer.begin_attempt(5, rank=2)
    found = ProgressReader(page).read(1)
    assert (found.attempt, found.rank, found.phase, found.progress) == (5, 2, Phase.setup, RowProgress(0))
    assert not writer._gauges


def test_gauges_are_read_by_the_background_thread(page, writer):
    reader = ProgressReader(page)
    links = [LinkReading(peer, 10 * peer, 2**40, 3, 1, 8, 0.025) for peer in range(MOST_LINKS + 2)]
    writer.gauge_device(lambda: 123)
    writer.gauge_links(lambda: links)
    until(lambda: reader.read(1).links)
    assert reader.read(1).device_bytes == 123
    assert reader.read(1).links == tuple(links[:MOST_LINKS])


def test_a_memory_checkpoint_is_reported_until_the_next_attempt(page, writer):
    reader = ProgressReader(page)
    writer.kept(7)
    assert reader.read(1).kept_step == 7
    writer.begin_attempt(5, rank=1)
    assert reader.read(1).kept_step == 0


def test_a_gauge_that_fails_is_asked_no_more_and_the_ticks_go_on(page, writer):
    asked = []

    def fail():
        asked.append(1)
        raise RuntimeError("gone")

    reader = ProgressReader(page)
    writer.gauge_device(fail)
    until(lambda: asked)
    tick = reader.read(1).tick
    until(lambda: reader.read(1).tick > tick + 3)
    assert asked == [1]


def test_the_fastest_of_a_link_is_kept_for_a_while(page, writer):
    reader, sent = ProgressReader(page), itertools.count(step=10_000_000)
    writer.gauge_links(lambda: [LinkReading(5, next(sent), 0, 0, 0, 1, 0.1)])
    until(lambda: reader.read(1).links and reader.read(1).links[0].peak_bps)
    assert reader.read(1).links[0].peak_bps < 8e9
    writer.drop_gauges()
    last = reader.read(1)
    until(lambda: reader.read(1).tick > last.tick + 2)
    assert reader.read(1).links == last.links


def test_computations_that_a_device_measures_are_reported(page, writer):
    writer.measure_device()
    writer.begin_step(1, 2)
    writer.slot_begins(F)
    writer.slot_ends(F)
    writer.begin_step(2, 2)
    assert (ProgressReader(page).read(1).busy_ns, ProgressReader(page).read(1).measured_steps) == (0, 0)
    writer.add_busy(0.5)
    assert (ProgressReader(page).read(1).busy_ns, ProgressReader(page).read(1).measured_steps) == (500_000_000, 1)


def test_a_held_lock_shows_from_outside(page):
    child = _child(
        page,
        "import ctypes; heartbeat.begin_step(1, 1); heartbeat.enter(Phase.steady); print(flush=True);"
        "ctypes.PyDLL(None).sleep(600)",  # PyDLL keeps the interpreter's lock
    )
    try:
        child.stdout.readline()
        reader = ProgressReader(page)

        def still():
            before = reader.read(0).tick
            sleep(1.0)
            return reader.read(0).tick == before

        until(still)
        assert process_state(child.pid).state == "S"
    finally:
        child.kill()
        child.wait()


def test_a_stopped_process_shows_from_outside(page):
    child = _child(page, "print(flush=True); time.sleep(600)")
    try:
        child.stdout.readline()
        reader = ProgressReader(page)
        until(lambda: reader.read(0).tick > 2)  # it lives, though its heartbeat stands still
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: process_state(child.pid).state in STOPPED)
        assert process_state(child.pid).started == reader.read(0).started
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: process_state(child.pid).state == "S")
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) is None


def test_a_rank_that_died_leaves_its_place(page):
    child = _child(page, "heartbeat.begin_step(3, 4); heartbeat.slot_begins(((Op.F, 0, 0),)); os._exit(3)")
    assert child.wait(LIMIT_S) == 3
    assert ProgressReader(page).read(0).progress == RowProgress(3, 0, True)


def _child(page, code):
    head = (
        "import os, time\nfrom pathlib import Path\nfrom weft.pipeline.action import Op\n"
        "from weft.engine.supervision.rank.agent_link import Heartbeat\n"
        "from weft.engine.supervision.progress_page import Phase\n"
        f"heartbeat = Heartbeat(Path({str(page)!r}), local_rank=0, rank=0, attempt=0)\n"
    )
    return subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE)


def test_what_is_no_page_is_refused(tmp_path, page):
    with pytest.raises(ValueError, match="WEFT_PROGRESS"):
        ProgressReader(tmp_path / "private" / "nothing")
    with pytest.raises(ValueError, match="room for 3"):
        Heartbeat(page, local_rank=3, rank=3, attempt=0)
    for content, message in ((b"x", "no progress page"), (b"x" * 64, "version")):
        page.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            ProgressReader(page)
    make_page(page, 2)
    with page.open("ab") as file:
        file.write(b"12345678")
    with pytest.raises(ValueError, match="words"):
        ProgressReader(page)
    make_page(page, 2)
    page.chmod(0o644)
    with pytest.raises(ValueError, match="this user alone"):
        ProgressReader(page)


def test_without_a_page_nothing_is_written():
    heartbeat = watcher_of({})
    heartbeat.enter(Phase.steady)
    with heartbeat.waiting(), heartbeat.within(Phase.checkpoint):
        pass
    assert heartbeat.observers(lambda: 0, lambda: True) == []
    heartbeat.close()


def test_a_rank_takes_its_page_from_the_environment(page):
    variables = {"WEFT_PROGRESS": str(page), "WEFT_ATTEMPT": "6", "LOCAL_RANK": "2", "RANK": "10"}
    watcher_of(variables).close()
    heartbeat = watcher_of(variables)  # as in the second attempt of a process
    try:
        reader = ProgressReader(page)
        assert (reader.read(2).attempt, reader.read(2).rank) == (6, 10)
        with heartbeat.within(Phase.evaluation):
            assert reader.read(2).phase is Phase.evaluation
        assert reader.read(2).phase is Phase.steady
        (observer,) = heartbeat.observers(lambda: 0, lambda: True)
        observer.step_begins(3)
        with heartbeat.waiting():
            assert reader.read(2).progress == RowProgress(1, 0, False, 1)
    finally:
        heartbeat.close()
