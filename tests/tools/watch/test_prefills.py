"""Prefills of the workers that share a rank's device: each is recorded once, in its step and in its bubble."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quickstart import TINY_QUICKSTART
from tests.waiting import until
from weft.engine.observability import event_ring
from weft.engine.observability.event_ring import PREFILL, RingWriter, encode, rings_folder
from weft.tools.watch import FOLDER
from weft.tools.watch.collector import Collector
from weft.tools.watch.prefills import READS_KEPT

pytest.importorskip("weft.inference", reason="needs the feature prefill")
from weft.inference.board import reader as reader_module
from weft.inference.board.reader import BoardReader
from weft.inference.board.writer import BoardWriter
from weft.inference.placement.prefill_cost import PrefillCost
from weft.inference.worker import chunk_recorder
from weft.inference.worker import gate as gate_module
from weft.inference.worker.chunk_recorder import ChunkRecorder
from weft.inference.worker.gate import Gate


@pytest.fixture
def run(tmp_path):
    yield make_run(tmp_path)
    shutil.rmtree(rings_folder(tmp_path), ignore_errors=True)


def make_run(folder):
    (folder / FOLDER).mkdir()
    return folder


def recorded(run):
    """Every event in the files of a run."""
    paths = (run / FOLDER).glob("spans-*.parquet")
    return pd.concat([pd.read_parquet(path).astype({"section": str, "slot": str}) for path in paths])


def steps_of(ring, numbers, start_s=100.0):
    for number in numbers:
        ring.write(encode("step"), 0, number, start_s + number, start_s + number + 0.9)


@given(data=st.data())
def test_every_chunk_is_recorded_once_in_the_step_in_which_it_began(tmp_path_factory, data):
    run = make_run(tmp_path_factory.mktemp("run"))
    folder, ranks = rings_folder(run), (0, 3)
    try:
        rings = {rank: RingWriter(folder, rank, 4096) for rank in ranks}
        worker, found = ChunkRecorder(str(folder), ranks, 1), Collector(run, "h")
        expected, attempt_s = [], 0.0
        for step in range(1, data.draw(st.integers(1, 12)) + 1):
            begun_s = 100.0 + step + attempt_s
            for _ in range(data.draw(st.integers(0, 3))):
                start_s = begun_s + data.draw(st.floats(0.0, 0.99))  # also between steps
                end_s, tokens = start_s + data.draw(st.floats(0.0, 3.0)), data.draw(st.integers(1, 2**20))
                worker.add(tokens, [(start_s, end_s, None)])
                expected += [(rank, step, f"prefill {tokens}", end_s - start_s) for rank in ranks]
                if data.draw(st.booleans()):
                    found.poll()
            for rank in ranks:
                rings[rank].write(encode("step"), 0, step, begun_s, begun_s + 0.9)
            match data.draw(st.sampled_from(["poll", "flush", "killed", "nothing"])):
                case "poll":
                    found.poll()
                case "flush":
                    found.poll()
                    found.flush()
                case "killed":  # the next worker has rings of its own
                    worker = ChunkRecorder(str(folder), ranks, 1)
        found.close()
        rows = recorded(run)
        rows = rows[rows.section == PREFILL]
        got = sorted(zip(rows["rank"], rows.step, rows.slot, rows.end_s - rows.start_s, strict=True))
        assert [each[:3] for each in got] == [each[:3] for each in sorted(expected)]
        assert np.allclose([each[3] for each in got], [each[3] for each in sorted(expected)], atol=1e-5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_chunks_before_the_first_step_belong_to_the_set_up_and_those_after_a_restart_to_the_new_steps(run):
    folder = rings_folder(run)
    ring, worker = RingWriter(folder, 0, 4096), ChunkRecorder(str(folder), [0], 1)
    found = Collector(run, "h")
    worker.add(1, [(100.5, 100.6, None)])
    steps_of(ring, [1, 2, 3])
    worker.add(2, [(103.5, 103.6, None)])
    found.poll()
    ring = RingWriter(folder, 0, 4096)  # a restarted rank repeats step 3
    worker.add(3, [(203.5, 203.6, None)])
    steps_of(ring, [3, 4], 200.0)
    found.poll()
    found.close()
    rows = recorded(run)
    assert dict(zip(rows.slot, rows.step, strict=True)) | {"step": 0} == {
        "step": 0,
        "prefill 1": 0,
        "prefill 2": 3,
        "prefill 3": 3,
    }


def test_chunks_that_are_read_long_after_their_step_are_placed_rightly(run):
    folder = rings_folder(run)
    ring, worker = RingWriter(folder, 0, 4096), ChunkRecorder(str(folder), [0], 1)
    found = Collector(run, "h")
    for number in range(1, READS_KEPT):
        steps_of(ring, [number])
        found.poll()
    worker.add(7, [(103.5, 115.0, None)])
    found.poll()
    found.close()
    rows = recorded(run)
    assert rows[rows.slot == "prefill 7"].step.tolist() == [3]


def test_rings_of_workers_that_ended_before_the_collector_began_are_read_and_removed(run, monkeypatch):
    folder = rings_folder(run)
    ring, chunk = RingWriter(folder, 0, 64), [(101.5, 101.6, None)]
    with monkeypatch.context() as ended:
        ended.setattr(event_ring, "own_identity", lambda: (os.getpid(), 1))  # of a process that began earlier
        for tokens in (1, 2):
            ChunkRecorder(str(folder), [0], 1).add(tokens, chunk)
    left = set(folder.glob("prefill*"))
    ChunkRecorder(str(folder), [0], 1).add(3, chunk)
    found = Collector(run, "h")
    steps_of(ring, [1, 2])
    found.poll()
    (path,) = folder.glob("prefill*")
    assert len(left) == 2 and path not in left
    found.close()
    rows = recorded(run)
    assert sorted(rows[rows.section == PREFILL].slot) == ["prefill 1", "prefill 2", "prefill 3"]


def test_granted_chunks_lie_in_the_bubbles_in_which_they_were_granted(run, tmp_path_factory, monkeypatch):
    """Every time is the test's: a rank that works and idles, and the gate of a worker that shares its device."""
    now, draw = [1000.0], np.random.default_rng(1)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=None)
    for module in (reader_module, gate_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(chunk_recorder, "monotonic", clock.monotonic)
    path = tmp_path_factory.mktemp("boards", numbered=True) / "private" / "rank0.board"
    board = BoardWriter(path, rank=0, plan=[], max_edges=16, beats=False)
    ring, found = RingWriter(rings_folder(run), 0, 4096), Collector(run, "h")
    gate = Gate([BoardReader(path)], PrefillCost(), guard_s=0.001)
    worker, granted, bubbles = ChunkRecorder(str(rings_folder(run)), [0], 1), [], []

    def idle(seconds, step):
        """Compute prompts until training continues."""
        opened_s, until_s = now[0], now[0] + seconds
        while True:
            tokens, bubble = gate.grant(2000, 0)
            needed_s = tokens * 1e-4
            if not tokens or now[0] + needed_s > until_s:
                break
            start_s = now[0]
            now[0] += needed_s
            gate.ended(start_s, now[0], tokens, 0)
            worker.add(tokens, [(start_s, now[0], None)])
            granted.append((step, tokens, start_s, bubble.opened_s))
        now[0] = until_s
        bubbles.append((step, opened_s, until_s))

    for step in range(101, 141):  # the board counts from 1
        begun_s = now[0]
        board.begin(1, round(now[0] * 1e9))
        for microbatch in range(3):
            idle(0.3 + 0.01 * draw.random(), step)
            board.busy(round(now[0] * 1e9))
            start_s = now[0]
            now[0] += 0.1
            ring.write(encode("F", 0, microbatch), 0, step, start_s, now[0])
            board.idle(round(now[0] * 1e9))
        board.busy(round(now[0] * 1e9))
        ring.write(encode("step"), 0, step, begun_s, now[0])
        now[0] += 0.05
        found.poll()
    found.close()
    rows = recorded(run)
    prefills, forwards = rows[rows.section == PREFILL].sort_values("start_s"), rows[rows.section == "F"]
    assert len(granted) > 40
    assert list(zip(prefills.step, prefills.slot, strict=True)) == [(s, f"prefill {n}") for s, n, *_ in granted]
    offset_s = prefills.start_s.iloc[0] - granted[0][2]
    for row, (step, _, _, opened_s) in zip(prefills.itertuples(), granted, strict=True):
        ((_, first_s, last_s),) = [each for each in bubbles if each[0] == step and each[1] == pytest.approx(opened_s)]
        assert first_s - 1e-5 <= row.start_s - offset_s <= row.end_s - offset_s <= last_s + 1e-5
        assert not ((forwards.start_s < row.end_s - 1e-5) & (forwards.end_s > row.start_s + 1e-5)).any()


@pytest.mark.parametrize("damage", ["open", "foreign", "link", "another rank"])
def test_a_ring_that_no_worker_of_this_user_made_does_no_harm(run, damage):
    folder = rings_folder(run)
    ring, worker = RingWriter(folder, 0, 64), ChunkRecorder(str(folder), [0], 1)
    worker.add(5, [(101.5, 101.6, None)])
    (path,) = folder.glob("prefill*")
    if damage == "open":
        path.chmod(0o666)
    elif damage == "foreign":
        path.write_bytes(b"\0" * 100)
    elif damage == "link":
        path.rename(folder / "other")
        path.symlink_to(folder / "other")
    else:
        RingWriter(folder, 77, 64, PREFILL).write(encode(PREFILL, -1, 3), 0, 0, 101.0, 102.0)
        path.unlink()
    found = Collector(run, "h")
    steps_of(ring, [1, 2])
    assert found.poll()
    found.flush()
    found.publish_current()
    found.close()
    assert recorded(run).section.tolist() == ["step", "step"] and not folder.exists()


def has_prefills(folder, logs):
    """True if prefills are in the run's files, and each worker has logged some."""
    has_files = bool(list((folder / FOLDER).glob("spans-*.parquet"))) and PREFILL in set(recorded(folder).section)
    return has_files and all(log.exists() and log.read_text() for log in logs)


def launch(folder, *settings):
    command = [sys.executable, "-m", "weft.tools.cli", "launch", *TINY_QUICKSTART, f"train.output_dir={folder}"]
    command += ["pipeline.stages=2", "cluster.ranks=2", "pipeline.microbatches=4", "inference=bubbles"]
    return [*command, f"inference.boards={folder}/boards", *settings]


@pytest.mark.slow
def test_chunks_of_killed_and_of_outliving_workers_are_in_the_files_of_a_run(tmp_path):
    folder, logs = tmp_path / "quickstart", [tmp_path / f"log{number}" for number in range(2)]
    rings = rings_folder(folder)
    job = subprocess.Popen(launch(tmp_path, "train.steps=150"), start_new_session=True)
    workers = []
    try:
        for log in logs:
            command = [sys.executable, Path(__file__).with_name("stand_in_worker.py"), tmp_path / "boards", rings, log]
            workers.append(subprocess.Popen(command))
        until(lambda: has_prefills(folder, logs) or job.poll() is not None, 240.0, pause_s=0.1)
        assert job.poll() is None and all(worker.poll() is None for worker in workers)
        workers[0].kill()
        workers[0].wait()
        assert job.wait(280) == 0
        while rings.exists():
            time.sleep(0.2)
        assert workers[1].poll() is None, "a worker outlives the run"
    finally:
        for process in (job, *workers):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert (folder / FOLDER / "collector.log").read_text() == "" and not rings.exists()
    rows = recorded(folder)
    prefills = rows[(rows.section == PREFILL) & (rows["rank"] == 1)].sort_values("start_s")
    steps = rows[(rows.section == "step") & (rows["rank"] == 1)].sort_values("start_s")
    lines = [line for log in logs for line in log.read_text().splitlines()]
    logged = sorted(map(json.loads, lines), key=lambda entry: entry[1])
    assert len(logged) > 10 and all(log.read_text() for log in logs)
    offset_s = prefills.start_s.iloc[0] - logged[0][1]
    # A worker that is killed may have recorded one that it has not logged; later ones have no step.
    ended = [entry for entry in logged if entry[2] + offset_s < steps.end_s.iloc[-1]]
    got = [(row.slot, row.start_s - offset_s) for row in prefills.itertuples()]
    computed = [(f"prefill {tokens}", start_s) for tokens, start_s, _ in ended]
    for slot, start_s in computed:  # the workers may begin at the same time
        alike = [[name == slot and abs(at_s - start_s) < 1e-4 for name, at_s in each] for each in (got, computed)]
        assert sum(alike[0]) >= sum(alike[1])
    assert len(got) <= len(logged) + 1
    begun = steps.start_s.to_numpy().searchsorted(prefills.start_s, side="right") - 1
    assert prefills.step.tolist() == [int(steps.step.iloc[place]) if place >= 0 else 0 for place in begun]
