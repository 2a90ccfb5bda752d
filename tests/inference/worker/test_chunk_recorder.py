"""A worker's steps reach the rings of its ranks, and nothing that is wrong with a ring stops the worker."""

import os
import shutil

import pytest

from weft.engine.observability.event_ring import PREFILL, RingReader, RingWriter, encode, rings_folder
from weft.inference.worker import chunk_recorder
from weft.inference.worker.chunk_recorder import ChunkRecorder

SPAN = [(1.0, 2.0, None)]


def events_of(folder, rank):
    """The events in all rings of workers at a rank."""
    paths = folder.glob(f"{PREFILL}*-{rank}")
    return sorted((event for path in paths for event in RingReader(path).read()), key=lambda event: event["first"])


@pytest.fixture
def folder(tmp_path):
    yield rings_folder(tmp_path)
    shutil.rmtree(rings_folder(tmp_path), ignore_errors=True)


def test_a_worker_records_nothing_without_a_run_and_makes_other_rings_for_the_next(folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(chunk_recorder, "monotonic", lambda: now[0])
    worker = ChunkRecorder(str(folder), [0], 1)
    worker.add(5, SPAN)
    assert not folder.exists(), "without training nothing is left behind"
    for tokens in (6, 7):
        RingWriter(folder, 0, 16)
        now[0] += 10.0
        worker.add(tokens, SPAN)
        (event,) = events_of(folder, 0)
        assert event["first"] == encode(PREFILL, -1, tokens)
        shutil.rmtree(folder)  # as the collector does at the end of a run
        worker.add(9, SPAN)
        now[0] += 10.0
        worker.add(9, SPAN)
        assert not folder.exists()


@pytest.mark.parametrize("obstacle", ["open folder", "no space"])
def test_a_worker_goes_on_where_it_cannot_record_and_warns_once(folder, obstacle, monkeypatch, caplog):
    RingWriter(folder, 0, 16)
    if obstacle == "open folder":
        folder.chmod(0o755)
    else:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    worker = ChunkRecorder(str(folder), [0], 1)
    for _ in range(3):
        worker.add(5, SPAN)
        worker._checked_s -= 10.0
    assert len([record for record in caplog.records if "missing in the timeline of rank 0" in record.message]) == 1


@pytest.mark.parametrize(("stages", "starts"), [(1, [1.0, 1.0, 1.0, 1.0]), (2, [1.0, 1.0, 3.0, 3.0])])
def test_stages_of_a_worker_are_recorded_at_their_ranks(folder, stages, starts):
    for rank in range(4):
        RingWriter(folder, rank, 16)
    ChunkRecorder(str(folder), [0, 1, 2, 3], stages).add(5, [(1.0, 2.0, None), (3.0, 4.0, 0.5)][:stages])
    assert [[event["start"] for event in events_of(folder, rank)] for rank in range(4)] == [[start] for start in starts]


def test_a_worker_that_starts_while_another_makes_its_ring_has_one_of_its_own(folder, monkeypatch):
    RingWriter(folder, 0, 16)
    first, second = (ChunkRecorder(str(folder), [0], 1) for _ in range(2))

    def begin(*arguments):
        monkeypatch.setattr(chunk_recorder, "RingWriter", RingWriter)
        second.add(6, SPAN)
        return RingWriter(*arguments)

    monkeypatch.setattr(chunk_recorder, "RingWriter", begin)
    first.add(5, SPAN)
    second.add(7, SPAN)
    assert [event["first"] for event in events_of(folder, 0)] == [encode(PREFILL, -1, tokens) for tokens in (5, 6, 7)]


@pytest.mark.parametrize(("folder", "ranks"), [("", [0]), ("/nonexistent", []), ("", [])])
def test_a_worker_without_rings_or_ranks_records_nothing(folder, ranks):
    ChunkRecorder(folder, ranks, 1).add(5, SPAN)
