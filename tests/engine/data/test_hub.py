"""Files of the hub are read as they were written, also without the hub."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import fsspec
import pytest

from tests.engine.data.test_as_written import config
from weft.conf.schema import DataKind
from weft.engine.data import build_loader
from weft.engine.data import open as opening

HUB_ROWS = [{"text": "2024-05-01T00:00:00"}, {"text": "2024-05-02T12:00:00", "source": "a"}]


@pytest.fixture
def on_hub(monkeypatch):
    """``on_hub(files)`` is a configuration of a data set with these files of one kind, on a hub in memory."""
    load = opening.load_dataset_builder

    def publish(files, kind="json", **more):
        for name, data in files.items():
            fsspec.filesystem("memory").pipe(f"/hub/{name}", data)
        found = {"train": [f"memory://hub/{name}" for name in files]}
        monkeypatch.setattr(opening, "load_dataset_builder", lambda path, **_: load(kind, data_files=found, **more))

    yield publish
    fsspec.filesystem("memory").store.clear()


def texts(data, tokenizer, count):
    loader = build_loader(data, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    rows = [tokenizer.decode(next(loader)["input_ids"][0]).replace("<|pad|>", "") for _ in range(count)]
    loader.close()
    return [row.removeprefix("<|bos|>").removesuffix("<|eos|>") for row in rows]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"a.jsonl": lines(HUB_ROWS)},
        {"a.jsonl": lines(HUB_ROWS[:1]), "b.jsonl": lines(HUB_ROWS[1:])},
        {"a.json": json.dumps(HUB_ROWS).encode()},
        {"a.jsonl.gz": gzip.compress(lines(HUB_ROWS))},
    ],
    ids=["lines", "files with other columns", "list", "compressed"],
)
def test_json_of_the_hub_is_read_as_it_was_written(tmp_path, tokenizer, on_hub, files, streaming):
    """Arrow's reader would make timestamps of these texts, and refuse a second file with other columns."""
    on_hub(files)
    data = config("owner/name", tmp_path, kind=DataKind.text, streaming=streaming, sequence_length=64)
    assert texts(data, tokenizer, 2) == [row["text"] for row in HUB_ROWS]


def table(separator):
    return f'text{separator}answer\n2024-05-01{separator}007\nNA{separator}"1e5, or so"\n'.encode()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("field", ["text", "answer"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv"])
def test_csv_of_the_hub_is_read_as_it_was_written(tmp_path, tokenizer, on_hub, name, field, streaming):
    """The reader of `datasets` would make numbers of "007", and nothing of "NA"."""
    separator = "\t" if name == "a.tsv" else ","
    content = table(separator)
    on_hub({name: gzip.compress(content) if name.endswith(".gz") else content}, "csv", sep=separator)
    data = config("owner/name", tmp_path, kind=DataKind.text, streaming=streaming, text_field=field)
    assert texts(data, tokenizer, 2) == {"text": ["2024-05-01", "NA"], "answer": ["007", "1e5, or so"]}[field]


def test_settings_of_a_page_of_the_hub_hold(tmp_path, on_hub):
    on_hub({"a.csv": table(";")}, "csv", sep=";")
    assert opening.hub_files(config("owner/name", tmp_path), "train", tmp_path) is None, "`datasets` applies them"


def test_what_was_fetched_from_the_hub_is_read_without_it(tmp_path, tokenizer, on_hub, monkeypatch):
    on_hub({"a.jsonl": lines(HUB_ROWS)})
    data = config("owner/name", tmp_path, kind=DataKind.text, sequence_length=64)
    assert len(texts(data, tokenizer, 2)) == 2

    def unreachable(*_, **__):
        raise ConnectionError("no hub")

    monkeypatch.setattr(opening, "load_dataset_builder", unreachable)
    assert texts(data, tokenizer, 2) == [row["text"] for row in HUB_ROWS]
    with pytest.raises(ValueError, match=r"data\.path=owner/other: split 'train' cannot be read"):
        texts(replace(data, path="owner/other"), tokenizer, 1)


def test_files_of_the_hub_are_fetched_by_name_and_revision(tmp_path, tokenizer, on_hub, monkeypatch):
    (tmp_path / "b.jsonl").write_bytes(lines(HUB_ROWS))
    asked = []

    def fetch(*given, **more):
        asked.append((given, more))
        return str(tmp_path / "b.jsonl")

    monkeypatch.setattr(opening, "hf_hub_download", fetch)
    assert opening._fetched("hf://datasets/owner/name@abc/data/b.jsonl") == tmp_path / "b.jsonl"
    assert asked == [(("owner/name", "data/b.jsonl"), {"repo_type": "dataset", "revision": "abc"})]


def test_a_bad_row_of_the_hub_is_named(tmp_path, tokenizer, on_hub):
    on_hub({"a.jsonl": b'{"text": "a"}\n{"text": '})
    data = config("owner/name", tmp_path, kind=DataKind.text, sequence_length=64)
    with pytest.raises(ValueError, match=r"memory:/+hub/a\.jsonl: line 2: not JSON"):
        texts(data, tokenizer, 2)
