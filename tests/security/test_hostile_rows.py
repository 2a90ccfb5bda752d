"""Rows of somebody else's data: nested without end, or larger than memory in a small file."""

import gzip
import os
import tarfile

import pytest

from weft.engine.data import rows
from weft.engine.data.messages import messages_of, tools_of
from weft.engine.data.rows import RowFault, read_rows

DEEP = "[" * 100_000


def test_json_in_a_text_may_be_nested_without_end():
    assert tools_of({"tools": DEEP}) == DEEP
    called = messages_of({"conversations": [{"from": "function_call", "value": DEEP}]}, ("conversations",))
    assert called[0]["tool_calls"] == []


def test_a_line_in_a_file_with_holes_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.touch()
    os.truncate(file, 100 << 30)
    with pytest.raises(RowFault, match="line 1: more than 256 MiB; write shorter lines"):
        next(read_rows(file))


def test_a_list_that_unpacks_to_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_LIST_CHARACTERS", 10_000)
    file = tmp_path / "rows.json.gz"
    file.write_bytes(gzip.compress(b"[" + b"0,\n" * 20_000 + b"0]"))
    with pytest.raises(RowFault, match="a list of more than 10,000 characters; write one object per line"):
        next(read_rows(file))


def test_a_sample_in_an_archive_with_holes_is_refused(tmp_path):
    member = tarfile.TarInfo("a.txt")
    member.size = 100 << 30
    file = tmp_path / "rows.tar"
    file.write_bytes(member.tobuf() + bytes(10_000))
    os.truncate(file, 101 << 30)
    with pytest.raises(RowFault, match="sample a: more than 256 MiB"):
        next(read_rows(file))
