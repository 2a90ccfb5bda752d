"""Lines of files in storage whose file objects read whole lines only, as fsspec's for S3 and the web do."""

import json

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import check_source, encode_first
from weft.engine.data import rows as reading
from weft.engine.data.rows import FileRows, RowFault, read_rows

FILES = {}
"""Contents by path. An exception is raised instead."""


class Part(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        if isinstance(content := FILES[self.path], Exception):
            raise content
        return content[start:end]


class Remote(AbstractFileSystem):
    protocol = "parts"

    def info(self, path, **_):
        content = FILES[path] if isinstance(FILES[path], bytes) else b"1234"
        return {"name": path, "size": len(content), "type": "file"}

    def _open(self, path, mode="rb", block_size=None, **more):
        return Part(self, path, mode, block_size=16, size=self.info(path)["size"], cache_type="bytes")


fsspec.register_implementation("parts", Remote, clobber=True)
TEXTS = ["it is 1.", "it is\u20282." * 50, "ünd 3."]


@pytest.mark.parametrize("form", ["lines", "list"])
def test_rows_are_read_by_parts(tokenizer, tmp_path, form):
    rows = [{"text": text} for text in TEXTS]
    content = json.dumps(rows) if form == "list" else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    name = "rows.json" if form == "list" else "rows.jsonl"
    FILES[name] = content.encode()
    assert [row["text"] for _, row in read_rows(f"parts://{name}")] == TEXTS
    data = DataConfig(kind=DataKind.text, path=f"parts://{name}", sequence_length=64, cache_dir=str(tmp_path))
    check_source(data)
    assert tokenizer.decode(encode_first(data, tokenizer).ids, skip_special_tokens=True).startswith("it is 1.")


def test_a_long_line_is_refused_unread(monkeypatch):
    monkeypatch.setattr(reading, "MOST_ROW_BYTES", 100)
    FILES["long.jsonl"] = b'{"text": "' + b"a" * 1000 + b'"}'
    with pytest.raises(RowFault, match="line 1: more than"):
        list(read_rows("parts://long.jsonl"))


class Unreachable(AbstractFileSystem):
    """Storage that hides its errors, as fsspec's for the web does: from `isfile` and `find`, or as another one."""

    protocol = "unreachable"

    def info(self, path, **_):
        if path.startswith("forbidden"):
            raise RuntimeError("403, Forbidden")
        raise FileNotFoundError(path) from RuntimeError("cannot connect to host")

    def find(self, path, *_, **__):
        return {}


fsspec.register_implementation("unreachable", Unreachable, clobber=True)


@pytest.mark.parametrize(("host", "reason"), [("forbidden", "403, Forbidden"), ("gone", "cannot connect to host")])
@pytest.mark.parametrize("path", ["a.jsonl", "folder", "*.jsonl"])
def test_storage_without_answer_is_named_with_its_reason(host, reason, path):
    url = f"unreachable://{host}/{path}"
    with pytest.raises(ValueError) as caught:
        check_source(DataConfig(kind=DataKind.text, path=url))
    remedy = "check the address and the credentials of this host"
    assert str(caught.value) == f"data.path={url}: cannot be read ({reason}); {remedy}"


def test_a_failure_of_storage_shows_no_credentials():
    FILES["me:secret@host/a.jsonl"] = RuntimeError("no answer from parts://me:secret@host/a.jsonl?sig=secret")
    with pytest.raises(OSError, match=r"parts://\*\*\*@host/a\.jsonl: reading has failed \(RuntimeError") as caught:
        list(FileRows(("parts://me:secret@host/a.jsonl",), ("text",)))
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None and caught.value.__suppress_context__
