"""Data in object storage, read by s3fs from a server of the S3 protocol on this machine."""

import json

import datasets
import fsspec
import pytest

from tests.engine.data.s3_server import s3_server
from tests.engine.data.test_sources import TEXTS, ids_of, text_data, write_shard
from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import check_source
from weft.engine.data import rows as reading
from weft.engine.data.rows import FileRows

core = pytest.importorskip(
    "s3fs.core", reason="needs s3fs: pip install --no-deps s3fs aiobotocore, and what they import"
)
BLOCK = 4096
LINES = b"".join(json.dumps({"text": f"{number:05}"}).encode() + b"\n" for number in range(1000))
URL = "s3://bucket/data/a.jsonl"


@pytest.fixture
def server(monkeypatch):
    """Read in small blocks, and try again at once."""
    monkeypatch.setattr(reading, "READ_BYTES", BLOCK)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with s3_server() as state:
        monkeypatch.setitem(
            fsspec.config.conf,
            "s3",
            {
                "endpoint_url": state.address,
                "key": "a",
                "secret": "b",
                "default_block_size": BLOCK,
                "config_kwargs": {"retries": {"max_attempts": 1}},
            },
        )
        core.S3FileSystem.clear_instance_cache()
        yield state
        core.S3FileSystem.clear_instance_cache()


def rows_of(url=URL):
    return [row["text"] for row in FileRows((url,), ("text",))]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "parquet", "tar"])
def test_objects_give_the_documents_of_files(server, tmp_path, tokenizer, form, streaming):
    for name, few in (("a", range(10)), ("b", range(10, 30))):
        path, rows = tmp_path / f"{name}.{form}", datasets.Dataset.from_dict({"text": [TEXTS[n] for n in few]})
        match form:
            case "jsonl":
                rows.to_json(path)
            case "parquet":
                rows.to_parquet(path)
            case "tar":
                write_shard(path, {f"{number:02}.txt": TEXTS[number] for number in few})
        server.objects[f"shards/{path.name}"] = path.read_bytes()
    server.delay_s = 0.02
    assert ids_of(text_data(tmp_path, "s3://bucket/shards", streaming=streaming), tokenizer) == TEXTS
    assert ids_of(text_data(tmp_path, f"s3://bucket/shards/*.{form}", streaming=streaming), tokenizer) == TEXTS


@pytest.mark.parametrize("url", [URL, "s3://bucket/data", "s3://bucket/data/*.jsonl"])
def test_refused_storage_is_named_before_the_start(server, url):
    server.objects["data/a.jsonl"], server.refuses_from = LINES, 0
    with pytest.raises(ValueError, match=r"data.path=s3://bucket/.*cannot be read \(.*; check the address and the cre"):
        check_source(DataConfig(kind=DataKind.text, path=url))


def test_a_connection_that_is_cut_is_read_on(server):
    server.objects["data/a.jsonl"] = LINES
    server.cut_at, server.cuts = 100, 1
    assert rows_of() == [f"{number:05}" for number in range(1000)]


def test_permission_that_ends_amid_an_object_is_an_error(server):
    server.objects["data/a.jsonl"], server.refuses_from = LINES, 2 * BLOCK
    with pytest.raises(OSError, match=r"s3://bucket/data/a.jsonl: reading has failed"):
        rows_of()
    assert server.starts == [0]


def test_an_object_that_is_replaced_amid_reading_is_an_error(server):
    server.objects["data/a.jsonl"] = LINES
    rows = iter(FileRows((URL,), ("text",)))
    assert next(rows) == {"text": "00000"}
    server.objects["data/a.jsonl"] = LINES[: len(LINES) // 2]
    with pytest.raises(OSError, match=r"a.jsonl: reading has failed"):
        list(rows)


@pytest.mark.parametrize("missing", [1, 18, 9000, 17982, 18000])
def test_missing_bytes_at_the_end_of_an_object_are_an_error(server, missing):
    """Also if a line of 18 bytes ends before them, so that the rows that were read are well-formed."""
    server.objects["data/a.jsonl"] = LINES
    server.most_bytes = len(LINES) - missing
    with pytest.raises(OSError, match=r"a.jsonl: reading has failed \(OSError: \d+ of its 18000 bytes are missing"):
        rows_of()


def test_missing_entries_of_an_archive_are_an_error(server, tmp_path):
    write_shard(tmp_path / "a.tar", {f"{number:02}.txt": text for number, text in enumerate(TEXTS)})
    server.objects["data/a.tar"] = (tmp_path / "a.tar").read_bytes()
    server.most_bytes = 1024 * 10  # ten entries of two blocks
    with pytest.raises(OSError, match=r"a.tar: reading has failed .* bytes are missing"):
        rows_of("s3://bucket/data/a.tar")
