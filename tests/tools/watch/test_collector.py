"""The collector's files hold every event of a run once, and outlive killed ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.quickstart import TINY_QUICKSTART
from tests.waiting import until
from weft.conf.host.processes import free_port
from weft.engine.observability.event_ring import RingReader, RingWriter, encode, event_text, rings_folder
from weft.tools.watch import FOLDER, collector
from weft.tools.watch.collector import Collector, spans, summaries
from weft.tools.watch.prefills import STORED


def random_events(count, seed=0):
    rng = np.random.default_rng(seed)
    events = np.zeros(count, STORED)
    events["rank"], events["step"] = rng.integers(0, 5, count), rng.integers(1, 9, count)
    kinds = [encode("F", 1, 0), encode("F", 1, 7), encode("F", 2, 0), encode("B", 1, 3), encode("data")]
    events["first"] = rng.choice(np.array(kinds, "u8"), count)
    events["start"] = rng.random(count)
    events["end"] = events["start"] + rng.random(count)
    return events


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_summaries_are_those_of_pandas(count):
    events = random_events(count)
    found = pa.table(summaries(events)).to_pandas()
    rows = pa.table(spans(events)).to_pandas()
    rows["s"] = rows.end_s - rows.start_s
    expected = rows.groupby(["step", "rank", "section", "stage"], observed=True).s.agg(["count", "mean", "max"])
    got = found.astype({"section": str}).set_index(["step", "rank", "section", "stage"]).sort_index()
    expected = expected.reset_index().astype({"section": str}).set_index(got.index.names).sort_index()
    assert got.index.equals(expected.index)
    assert np.array_equal(got["count"], expected["count"])
    assert np.allclose(got.mean_s, expected["mean"]) and np.allclose(got.max_s, expected["max"])


def test_summaries_of_ten_thousand_ranks_count_every_event():
    events = random_events(10_000 * 8)
    events["rank"], events["step"] = np.repeat(np.arange(10_000), 8), 1
    assert sum(summaries(events)["count"]) == len(events)


@pytest.fixture
def run(tmp_path):
    (tmp_path / FOLDER).mkdir()
    yield tmp_path
    shutil.rmtree(rings_folder(tmp_path), ignore_errors=True)


def parts(run, kind):
    return sorted((run / FOLDER).glob(f"{kind}-h-*.parquet"))


def write_steps(ring, steps):
    for step in steps:
        for microbatch in range(4):
            ring.write(encode("F", 0, microbatch), 0, step, 10.0, 10.5)
        ring.write(encode("step"), 0, step, 10.0, 12.0)


def test_a_step_is_written_when_its_events_are_complete(run):
    ring = RingWriter(rings_folder(run), 0, 4096)
    found = Collector(run, "h")
    write_steps(ring, range(1, 6))
    assert found.poll()
    found.flush()
    assert set(pd.read_parquet(parts(run, "steps")[0]).step) == {1, 2, 3}
    ring.close(finished=True)
    assert not found.poll() and found.is_finished
    found.close()
    table = pd.read_parquet(parts(run, "spans")[0])
    assert len(table) == 25 and not rings_folder(run).exists()


def test_the_ring_of_a_restarted_rank_is_read_after_the_killed_one(run):
    found = Collector(run, "h")
    write_steps(RingWriter(rings_folder(run), 0, 4096), [1, 2])
    found.poll()
    write_steps(RingWriter(rings_folder(run), 0, 4096), [2, 3])
    found.poll()
    found.close()
    table = pd.read_parquet(parts(run, "steps")[0])
    assert sorted(table.step.unique()) == [1, 2, 3]


def test_a_later_collector_adds_files(run, monkeypatch):
    monkeypatch.setattr(collector, "PART_ROWS", 10)
    for attempt in range(2):
        found = Collector(run, "h")
        ring = RingWriter(rings_folder(run), 0, 4096)
        for step in range(attempt * 8, attempt * 8 + 8, 4):
            write_steps(ring, range(step, step + 4))
            found.poll()
            found.flush()
        found.close()
    assert len(parts(run, "steps")) >= 3
    steps = pd.concat([pd.read_parquet(path) for path in parts(run, "steps")])
    assert sorted(steps[steps.section == "step"].step) == list(range(16))


def test_only_the_first_and_the_newest_files_of_spans_are_kept(run, monkeypatch):
    monkeypatch.setattr(collector, "PART_ROWS", 1)
    monkeypatch.setattr(collector, "SPAN_PARTS", 3)
    found, ring = Collector(run, "h"), RingWriter(rings_folder(run), 0, 4096)
    for step in range(1, 9):
        write_steps(ring, [step])
        found.poll()
        found.flush()
    assert [path.stem[-1] for path in parts(run, "spans")] == ["1", "5", "6"]
    assert len(parts(run, "steps")) == 6


def test_events_between_the_last_round_and_the_end_are_written(run):
    ring, found = RingWriter(rings_folder(run), 0, 4096), Collector(run, "h")
    write_steps(ring, [1])
    found.poll()
    write_steps(ring, [2])
    ring.close(finished=True)
    assert found.is_finished
    found.close()
    assert set(pd.read_parquet(parts(run, "steps")[0]).step) == {1, 2}


def launch(folder, *settings):
    command = [sys.executable, "-m", "weft.tools.cli", "launch", *TINY_QUICKSTART, f"train.output_dir={folder}"]
    return [*command, "pipeline.stages=2", "cluster.ranks=2", "pipeline.microbatches=4", *settings]


def test_however_slow_writes_are_the_collector_ends_after_the_last_rank(monkeypatch):
    now, opens = [0.0], iter([True] * 50)

    def last(seconds):
        now[0] += seconds

    monkeypatch.setattr(collector, "monotonic", lambda: now[0])
    monkeypatch.setattr(collector, "sleep", last)
    watched = SimpleNamespace(
        poll=lambda: next(opens, False),
        flush=lambda: last(3 * collector.END_S),
        publish_current=lambda: last(2 * collector.END_S),
        is_finished=False,
        unwritten=0,
    )
    times = []
    for _ in collector.rounds(watched):
        times.append(now[0])
    assert len(times) > 50, "a rank was still running"
    assert now[0] - times[49] > collector.END_S, "a restarted rank is waited for"


@pytest.mark.slow
def test_the_files_of_a_run_hold_every_slot_of_every_step(tmp_path):
    subprocess.run(launch(tmp_path, "train.steps=4", "checkpoint.every=2"), timeout=240, check=True)
    folder = tmp_path / "quickstart"
    plan = json.loads((folder / "plan.json").read_text())
    rows = [row.split() for row in plan["schedules"]["1"]["rows"]]
    found = pd.concat([pd.read_parquet(path) for path in (folder / FOLDER).glob("spans-*.parquet")])
    slots = found[~found.section.isin(["data", "sums", "step", "checkpoint", "gradients", "weights"])]
    for step in range(1, 5):
        for rank in range(2):
            mine = slots[(slots.step == step) & (slots["rank"] == rank)].sort_values("start_s")
            assert mine.slot.tolist() == rows[rank]
            assert (mine.end_s.to_numpy()[:-1] <= mine.start_s.to_numpy()[1:]).all()
    assert set(found[found.section == "checkpoint"].step) == {2}
    steps = pd.concat([pd.read_parquet(path) for path in (folder / FOLDER).glob("steps-*.parquet")])
    assert steps["count"].sum() == len(found)
    assert (steps.max_s >= steps.mean_s - 1e-12).all()
    assert not rings_folder(folder).exists()
    assert (folder / FOLDER / "collector.log").read_text() == ""


@pytest.mark.slow
def test_the_last_events_of_a_killed_rank_are_in_the_files_and_metrics_are_served(tmp_path):
    port = free_port()
    # A group of its own, so that nothing stays.
    job = subprocess.Popen(
        launch(tmp_path, "train.steps=100000", f"logging.prometheus_port={port}"), start_new_session=True
    )
    folder = tmp_path / "quickstart" / FOLDER
    try:
        until(lambda: list(folder.glob("steps-*.parquet")) or job.poll() is not None, 200.0)
        assert job.poll() is None
        time.sleep(1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert "weft_loss " in text and 'weft_rank_step_seconds{rank="1"}' in text
        now = json.loads(next(folder.glob("now-*.json")).read_text())
        assert {entry["rank"] for entry in now["ranks"]} == {0, 1} and all(entry["alive"] for entry in now["ranks"])
        victim = RingReader(rings_folder(tmp_path / "quickstart") / "rank1")
        os.kill(victim.pid, signal.SIGKILL)
        last = victim.read()[-1]
        assert job.wait(60) != 0
        until(lambda: not rings_folder(tmp_path / "quickstart").exists())
        found = pd.concat([pd.read_parquet(path) for path in folder.glob("spans-*.parquet")])
        mine = found[found["rank"] == 1].sort_values("end_s")
        assert mine.step.iloc[-1] == last["step"]
        assert mine.slot.iloc[-1] == event_text(int(last["first"]), int(last["second"]))
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait(30)
