"""Tests that the journal survives its writer, and that a torn line does not affect the next one."""

import errno
import os
import stat
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from weft.engine.supervision.driver.files import Journal, read_journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "supervisor" / "journal.jsonl"


def test_events_are_read_back_in_order(path):
    journal = Journal(path, clock=lambda: 12.3456)
    journal.record("attempt", attempt=1, ranks={"0": "a"})
    journal.record("end", code=0)
    journal.close()
    assert read_journal(path) == [
        {"at": 12.346, "event": "attempt", "attempt": 1, "ranks": {"0": "a"}},
        {"at": 12.346, "event": "end", "code": 0},
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_journal_that_is_not_there_is_empty(path):
    assert read_journal(path) == []


@pytest.mark.parametrize("torn", ['{"at": 1, "eve', '{"at": 1, "event": "end"}', "\0\0\0"])
def test_a_torn_last_line_is_left_out_and_cut_off(path, torn):
    Journal(path).record("launch")
    with open(path, "a") as file:
        file.write(torn)
    assert [event["event"] for event in read_journal(path)] == ["launch"]
    again = Journal(path)
    assert [event["event"] for event in again.past] == ["launch"]
    again.record("attempt")
    assert [event["event"] for event in read_journal(path)] == ["launch", "attempt"]


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"at": 1}', '{"event": 3}', "[" * 100_000])
def test_a_journal_without_a_sound_attempt_is_an_error(path, line):
    path.parent.mkdir(parents=True)
    path.write_text(line + '\n{"event": "end"}\n')
    with pytest.raises(ValueError, match="line 1 is damaged"):
        Journal(path)


def test_a_link_is_not_followed(path, tmp_path):
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Journal(path)


def test_lines_wait_while_the_disk_is_full(path, monkeypatch, capsys):
    journal = Journal(path)
    journal.record("launch")
    pwrite, full = os.pwrite, [True]

    def write(file, data, at):
        if not full[0]:
            return pwrite(file, data, at)
        if len(data) > 10:
            return pwrite(file, data[:10], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", write)
    journal.record("fault")
    journal.record("x")
    assert [event["event"] for event in read_journal(path)] == ["launch"]
    assert capsys.readouterr().err.count("its next lines wait") == 1
    full[0] = False
    journal.flush()
    assert [event["event"] for event in read_journal(path)] == ["launch", "fault", "x"]


def test_lines_wait_while_the_disk_of_the_log_is_full_too(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = Journal(path)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", fail)
        full.setattr("sys.stderr", SimpleNamespace(write=fail, flush=fail))
        journal.record("fault")
    journal.flush()
    assert [event["event"] for event in read_journal(path)] == ["fault"]


def test_a_driver_goes_on_from_the_sound_lines_of_a_damaged_journal(path, capsys):
    with closing(Journal(path)) as journal:
        for event in ("launch", "attempt", "good_step"):
            journal.record(event)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00\xff" + lines[1][2:] + lines[2])
    with closing(Journal(path)) as journal:
        assert [event["event"] for event in journal.past] == ["launch", "good_step"]
        journal.record("end")
    assert "line 2 is damaged" in capsys.readouterr().err and path.with_suffix(".damaged").exists()
    assert [event["event"] for event in read_journal(path)] == ["launch", "good_step", "end"]


def test_a_disk_that_hangs_holds_up_neither_the_driver_nor_an_event(path, monkeypatch, capsys):
    journal, fsync, answers = Journal(path), os.fsync, threading.Event()

    def hanging(file):
        assert answers.wait(60), "the driver waits for the disk"
        fsync(file)

    monkeypatch.setattr(os, "fsync", hanging)
    for event in ("launch", "attempt", "fault"):
        journal.record(event)
    journal.flush()
    assert capsys.readouterr().err.count("nothing was written for 1 s; its next lines wait") == 1
    answers.set()
    journal.close()
    assert [event["event"] for event in read_journal(path)] == ["launch", "attempt", "fault"]
