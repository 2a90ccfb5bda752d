"""Files are whole, or as they were."""

import fcntl
import json
import os

import pytest

from weft.conf.host.files import JsonCache, replacing, scratch_folder, write_atomic


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_atomic(path, "a\n")
    write_atomic(path, "b\r\n")
    assert path.read_bytes() == b"b\r\n"
    assert [each.name for each in path.parent.iterdir()] == ["file.txt"]


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file.txt"
    write_atomic(path, "a")
    with pytest.raises(RuntimeError), replacing(path) as draft:
        draft.write_text("half")
        raise RuntimeError
    assert path.read_text() == "a"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_does_not_replace_a_device(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="cannot be replaced by a file"):
        write_atomic(path, "a")
    assert path.is_fifo()


def test_writers_of_one_file_do_not_meet(tmp_path):
    """Process numbers would not tell them apart: hosts that share a folder may share those."""
    path = tmp_path / "file.txt"
    with replacing(path) as one, replacing(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one", "the last to end"
    assert list(tmp_path.iterdir()) == [path]


BAD = ["", "[1]", "{", "null", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "[" * 100_000, "\0"]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:16].replace("\0", "0"))
def test_a_cache_that_cannot_be_read_begins_anew(tmp_path, text):
    cache = JsonCache(tmp_path / "cache.json")
    cache.path.write_text(text)
    assert cache.read() == {}
    cache.add({"a": 1})
    cache.add({"b": [2]})
    assert json.loads(cache.path.read_text()) == cache.read() == {"a": 1, "b": [2]}


def test_a_temporary_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("weft-") as first:
        os.utime(first, (0, 0))
        for name in ("weft-killed", "weft-new", "other-killed"):
            (tmp_path / name).mkdir()
            if name != "weft-new":
                os.utime(tmp_path / name, (0, 0))
        (tmp_path / "weft-link").symlink_to(tmp_path / "other-killed")
        with scratch_folder("weft-") as second:
            left = {path.name for path in tmp_path.iterdir()}
            assert {os.path.basename(first), os.path.basename(second), "weft-new", "other-killed"} <= left
            assert "weft-killed" not in left and len(left) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"weft-new", "other-killed", "weft-link"}


def test_a_temporary_folder_stays_locked_in_a_process_that_was_forked(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("weft-") as name:
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            os.read(reader, 1)
            os._exit(0)
        held = os.open(name, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(writer, b"x")
    os.waitpid(pid, 0)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for each in (held, reader, writer):
        os.close(each)
