"""Tests of calls and values of storage that hangs."""

import threading

import pytest

from weft.conf.host import storage
from weft.conf.host.storage import Storage, StorageHangs, TimedRead


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def test_storage_that_hangs_yields_the_last_value_until_it_answers(monkeypatch, path):
    monkeypatch.setattr(storage, "STORAGE_TIMEOUT_S", 0.01)
    answers, hangs, reads = iter("ab"), threading.Event(), []

    def read():
        reads.append(1)
        if len(reads) > 1:
            hangs.wait()
        return next(answers)

    value = TimedRead(path, read)
    assert [value(), value(), value()] == ["a"] * 3 and len(reads) == 2, "one read hangs, and no other starts"
    hangs.set()
    value._storage._last[1].result()
    assert value() == "b" and len(reads) == 2


def test_storage_that_hangs_ends_a_call_with_an_error_and_the_same_call_returns_its_result(monkeypatch, path):
    monkeypatch.setattr(storage, "STORAGE_TIMEOUT_S", 0.01)
    hangs, calls, folder = threading.Event(), [], Storage(path)

    def work(name, limit_s=0.01):
        calls.append(name)
        hangs.wait()
        return name

    for name in ("one", "two", "one"):
        with pytest.raises(StorageHangs, match=f"storage has not answered for 0.01 s: '{path}'"):
            folder.call(work, name, limit_s=0.01)
    assert calls == ["one"], "nothing else is called in the meantime"
    hangs.set()
    assert folder.call(work, "one", limit_s=None) == "one" and calls == ["one"]
    assert folder.call(work, "two", limit_s=None) == "two"
    with pytest.raises(KeyError):
        folder.call({}.__getitem__, "no such key")


def test_a_late_error_is_logged_if_another_call_follows(caplog, path):
    hangs, folder = threading.Event(), Storage(path)

    def fail():
        hangs.wait()
        raise PermissionError("read-only")

    with pytest.raises(StorageHangs):
        folder.call(fail, limit_s=0.01)
    hangs.set()
    folder._last[1].exception()
    assert folder.call(str, 1, limit_s=None) == "1", "the error is not that of this call"
    (said,) = caplog.messages
    assert all(part in said for part in (str(path), "a call of fail", "PermissionError('read-only')"))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_thread_that_ends_is_an_error_and_no_hang(path, error):
    folder = Storage(path)

    def end():
        raise error

    with pytest.raises(type(error)):
        folder.call(end, limit_s=10)
    assert folder.call(str, 1, limit_s=10) == "1"
