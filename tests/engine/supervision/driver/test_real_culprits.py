"""Ranks that train for real: whichever stops, their progress name that one."""

import os
import signal
import threading
from time import monotonic, monotonic_ns, sleep

import pytest

from tests.engine.supervision.driver.stopped_training import train_until_stopped
from tests.engine.tiny import tiny_config
from weft.conf.host.processes import STOPPED, process_state
from weft.engine.supervision.driver.culprit import find_culprits, read_rows
from weft.engine.supervision.progress_page import ProgressReader, make_page
from weft.tools.ranks import run_ranks

RANKS = 4
LIMIT_S = 150.0
# Arguments of `tiny_config`, the rank, what befalls it, and the step and slot at which; None is while it reads data.
CASES = {
    "forward": ({}, 1, "hang", (2, 3, False)),
    "stopped in a backward": ({"zero": 1}, 2, "stop", (3, 8, False)),
    "lock held while sending": ({"zero": 2}, 0, "hold_lock", (2, 4, False)),
    "STEP": ({"zero": 1}, 3, "hang", (2, -1, False)),
    "data": ({"zero": 1}, 2, "hang", (3, None, False)),
    "ZeRO-3": ({"stages": 1, "zero": 3, "microbatches": 2}, 2, "hang", (2, 4, True)),
    "relay of a cell": ({"sites": (1, 1), "cell": 2}, 1, "stop", (3, 5, False)),
    "fold": ({"schedule": "w", "placement": "fold"}, 3, "stop", (2, 9, False)),
}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_the_one_that_stops_is_named(case, tmp_path):
    keywords, rank, fault, where = CASES[case]
    page, plan = tmp_path / "private" / "page", tmp_path / "plan.json"
    make_page(page, RANKS)
    config = tiny_config(**{"stages": 2, **keywords})
    arguments = (config, page, plan, rank, fault, where)
    ended = []

    def train():
        try:
            run_ranks(RANKS, train_until_stopped, *arguments, timeout_s=LIMIT_S)
        except RuntimeError as error:
            ended.append(error)

    ranks = threading.Thread(target=train, daemon=True)
    ranks.start()
    try:
        reader = ProgressReader(page)
        until(lambda: all(reader.read(local) for local in range(RANKS)), ended)
        rows = read_rows(plan.read_text())
        until(lambda: named(rows, reader) == [rank], ended, lambda: told(rows, reader))
        links = {(local, link.peer): link for local in range(RANKS) for link in reader.read(local).links}
        assert set(links) == ({(0, 2), (1, 3), (2, 0), (3, 1)} if config.cluster.sites else set()), (
            "those between sites"
        )
        assert not links or any(link.sent_bytes and link.ready for link in links.values())
        state = process_state(reader.read(rank).pid).state
        assert (state in STOPPED) == (fault == "stop")
    finally:
        for local in range(RANKS):
            reading = reader.read(local)
            if reading is not None and process_state(reading.pid) is not None:
                kill(reading)
        ranks.join(30.0)
    assert ended and not ranks.is_alive()


def kill(reading):
    if process_state(reading.pid).started == reading.started:
        os.kill(reading.pid, signal.SIGKILL)


def until(condition, ended, explain=lambda: "not in time"):
    limit = monotonic() + LIMIT_S - 20.0
    while not condition():
        assert not ended, ended[0]
        assert monotonic() < limit, explain()
        sleep(0.1)


def named(rows, reader):
    """Return the suspects if no rank has moved for two seconds, or None while ranks move."""
    before = [reader.read(local) for local in range(RANKS)]
    if monotonic_ns() - max(reading.moved_ns for reading in before) < 2e9:
        return None
    after = [reader.read(local) for local in range(RANKS)]
    silent = [reading.rank for reading in after if _ticks_no_more(reader, reading)]
    found = find_culprits(rows, {reading.rank: reading.progress for reading in after}, silent=silent)
    return [suspect.rank for suspect in found]


def _ticks_no_more(reader, reading):
    limit = monotonic() + 2.0
    while monotonic() < limit:
        if reader.read(reading.rank).tick != reading.tick:
            return False
        sleep(0.05)
    return True


def told(rows, reader):
    readings = [reader.read(local) for local in range(RANKS)]
    return "\n".join(f"{r.rank}: {rows.doing(r.rank, r.progress)} {r.progress} tick {r.tick}" for r in readings)
