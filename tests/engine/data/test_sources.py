from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import build_loader, check_source
from weft.engine.data import open as opening
from weft.engine.data.documents import Part, document_key

TEXTS = [f"what is {n}?\nit is {2 * n}." for n in range(30)]


def text_data(folder: Path, path: str, **more) -> DataConfig:
    cache_dir = str(folder / "cache")
    return DataConfig(**{"kind": DataKind.text, "path": path, "sequence_length": 64, "cache_dir": cache_dir} | more)


def ids_of(config, tokenizer) -> list[str]:
    """Texts of one unshuffled, unpacked epoch."""
    config.packing = config.shuffle = False
    check_source(config)
    loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    texts = []
    for batch in loader:
        if loader.state_dict()["epoch"]:
            break
        texts.append(tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True))
    loader.close()
    return texts


def write_shard(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w") as shard:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            shard.addfile(member, BytesIO(text.encode()))


def make(tmp_path: Path, form: str) -> str:
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    path = tmp_path / "data"
    match form:
        case "jsonl":
            rows.to_json(path.with_suffix(".jsonl"))
            return str(path.with_suffix(".jsonl"))
        case "json":
            rows.to_json(path.with_suffix(".json"), lines=False)
            return str(path.with_suffix(".json"))
        case "parquet":
            rows.to_parquet(path.with_suffix(".parquet"))
            return str(path.with_suffix(".parquet"))
        case "tar":
            write_shard(path.with_suffix(".tar"), {f"{number:02}.txt": text for number, text in enumerate(TEXTS)})
            return str(path.with_suffix(".tar"))
        case "tars":
            path.mkdir()
            for name, few in (("a.tar", range(10)), ("b.tar", range(10, 30))):
                write_shard(path / name, {f"x/{number}.json": json.dumps({"text": TEXTS[number]}) for number in few})
        case "file" | "memory":
            url = f"memory://bucket/{tmp_path.name}" if form == "memory" else f"file://{tmp_path}/bucket"
            storage, folder = fsspec.core.url_to_fs(url)
            storage.makedirs(folder, exist_ok=True)
            for name, few in (("a.parquet", range(10)), ("b.parquet", range(10, 30))):
                rows.select(few).to_parquet(tmp_path / name)
                storage.pipe_file(f"{folder}/{name}", (tmp_path / name).read_bytes())
            return url + ("/*.parquet" if form == "file" else "")
        case "saved":
            rows.save_to_disk(path)
        case "folder":
            path.mkdir()
            rows.select(range(10)).to_json(path / "a.jsonl")
            rows.select(range(10, 30)).to_json(path / "b.jsonl")
        case "txt":
            path.mkdir()
            for number, text in enumerate(TEXTS):
                (path / f"{number:02}.txt").write_text(text)
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "form", ["jsonl", "json", "parquet", "saved", "folder", "txt", "tar", "tars", "file", "memory"]
)
def test_every_form_gives_the_same_documents(tmp_path, tokenizer, form, streaming):
    config = text_data(tmp_path, make(tmp_path, form), streaming=streaming)
    assert ids_of(config, tokenizer) == TEXTS


def test_a_file_that_changes_is_read_again(tmp_path, tokenizer, write):
    config = text_data(tmp_path, write("a.jsonl", [{"text": "one"}]))
    assert ids_of(config, tokenizer) == ["one"]
    write("a.jsonl", [{"text": "one"}, {"text": "two"}])
    assert ids_of(config, tokenizer) == ["one", "two"]


def test_the_cache_serves_the_second_time(tmp_path, tokenizer, write, monkeypatch):
    config = text_data(tmp_path, write("a.jsonl", [{"text": "one"}]))
    assert ids_of(config, tokenizer) == ["one"]
    monkeypatch.setattr(opening.TextEncoder, "__call__", None)
    assert ids_of(config, tokenizer) == ["one"]


def test_the_cache_is_of_one_field(tmp_path, tokenizer, write):
    """Another field of the same file is not served from the first one's tokens."""
    config = text_data(tmp_path, write("a.jsonl", [{"text": "one", "other": "two"}]))
    assert ids_of(config, tokenizer) == ["one"]
    config.text_field = "other"
    assert ids_of(config, tokenizer) == ["two"]


def test_texts_are_closed_and_empty_ones_left_out(tmp_path, tokenizer, write):
    config = text_data(tmp_path, write("a.jsonl", [{"text": "one"}, {"text": ""}, {"text": "two"}]), shuffle=False)
    loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    assert "2 documents" in loader.description and "1 left out" in loader.description
    row = next(loader)["input_ids"][0].tolist()
    loader.close()
    assert tokenizer.decode(row).replace("<|pad|>", "") == "<|bos|>one<|eos|><|bos|>two<|eos|>"


@pytest.mark.parametrize("streaming", [False, True])
def test_long_documents_are_cut_only_where_nothing_is_packed(tmp_path, tokenizer, write, streaming):
    path = write("a.jsonl", [{"text": "one two three " * 20}])
    config = text_data(tmp_path, path, sequence_length=16, streaming=streaming, packing=False)
    loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    next(loader), next(loader)
    assert loader.state_dict()["epoch"] == 1
    assert "1 truncated" in loader.description or (streaming and " truncated" in loader.description)
    loader.close()
    config.packing = True
    loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    next(loader), next(loader)
    assert loader.state_dict()["epoch"] == 0 and "truncated" not in loader.description
    loader.close()


def test_the_hub_is_asked_for_path_name_split_and_streaming(monkeypatch, tokenizer, tmp_path):
    asked = []

    def load(path, **options):
        asked.append((path, options.pop("name"), options.pop("split"), options.pop("streaming")))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(opening, "load_dataset", load)
    config = DataConfig(
        kind=DataKind.text, path="owner/name", name="en", eval_split="validation", cache_dir=str(tmp_path)
    )
    for evaluation in (False, True):
        build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0, evaluation=evaluation)
    assert asked == [("owner/name", "en", "train", False), ("owner/name", "en", "validation", False)]


FAULTS = {
    "hub": ({"path": "owner/name"}, r"data\.path=owner/name: split 'train' cannot be read"),
    "split": ({"split": "test"}, r"split 'test' cannot be read \(.*check data\.path, data\.name and data\.split"),
    "field": ({"text_field": "body"}, r"data\.text_field=body: .* has no such field, but text"),
    "messages": ({"kind": DataKind.chat}, r"data\.messages_field=messages: .* has no such field, but text"),
    "null": ({"path": "null.jsonl"}, r"data\.text_field=text: row 2 holds nothing \(null\), not text"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_read_is_one_clear_error(tmp_path, tokenizer, write, monkeypatch, case, streaming):
    changes, message = FAULTS[case]
    write("null.jsonl", [{"text": "a"}, {"text": None}])
    path = write("a.jsonl", [{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    config = DataConfig(
        **{"kind": DataKind.text, "path": path, "cache_dir": str(tmp_path / "c"), "streaming": streaming, **changes}
    )
    with pytest.raises(ValueError, match=message):
        next(build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0))


def test_evaluation_needs_something_held_back(write, tokenizer, tmp_path):
    path = write("a.jsonl", [{"text": "a"}])
    config = DataConfig(kind=DataKind.text, path=path, cache_dir=str(tmp_path / "c"))
    options = {"microbatch_size": 1, "replica": 0, "num_replicas": 1, "seed": 0}
    with pytest.raises(ValueError, match=r"data\.eval_fraction=0\.0: nothing is held out"):
        build_loader(config, tokenizer, evaluation=True, **options)
    config.eval_fraction = 0.5
    with pytest.raises(ValueError, match="no documents for training among 1 rows"):
        build_loader(config, tokenizer, **options)


@given(st.lists(st.lists(st.integers(0, 10**5), max_size=3), max_size=40), st.floats(0, 0.99))
def test_what_is_held_back_depends_on_contents_alone(documents, fraction):
    keys = np.array([document_key(ids) for ids in documents], dtype=np.int64)
    held, rest = (Part(fraction=fraction, evaluation=side) for side in (True, False))
    mask = held.of_all(keys)
    assert (mask != rest.of_all(keys)).all()
    assert mask[::-1].tolist() == held.of_all(keys[::-1]).tolist()
    sides = dict(zip(keys.tolist(), mask.tolist(), strict=True))
    assert [sides[key] for key in keys.tolist()] == mask.tolist(), "equal documents stay together"
    if fraction > 0 and len(keys):
        assert mask.sum() >= max(1, round(len(keys) * fraction))


def test_a_streams_share_is_about_the_fraction():
    keys = [document_key([n, n + 1]) for n in range(5000)]
    held, rest = (Part(fraction=0.1, evaluation=side) for side in (True, False))
    assert 0.08 < np.mean([held.of_stream(key) for key in keys]) < 0.12
    assert all(held.of_stream(key) != rest.of_stream(key) for key in keys)
    assert all(Part(fraction=0.0, evaluation=False).of_stream(key) for key in keys)


RANK = """
import json, sys
from transformers import AutoTokenizer
from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import build_loader

path, folder, cache = sys.argv[1:]
loader = build_loader(
    DataConfig(kind=DataKind.text, path=path, cache_dir=cache),
    AutoTokenizer.from_pretrained(folder),
    microbatch_size=1, replica=0, num_replicas=1, seed=0,
)
print(json.dumps([loader.state_dict()["order"], next(loader)["input_ids"].tolist()]))
"""


@pytest.mark.slow
def test_ranks_that_come_at_once_share_one_cache(tmp_path, tokenizer, write):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write("a.jsonl", [{"text": text} for text in TEXTS])
    command = [sys.executable, "-c", RANK, path, str(tmp_path / "tokenizer"), str(tmp_path / "cache")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        answers = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert answers[0] == answers[1]
    assert len(list((tmp_path / "cache").glob("tokens-*.arrow"))) == 1


@pytest.mark.parametrize("form", ["file", "tars"])
def test_a_stream_of_files_resumes_in_the_middle(tmp_path, tokenizer, form):
    config = DataConfig(
        kind=DataKind.text, path=make(tmp_path, form), streaming=True, sequence_length=16, shuffle_buffer=7
    )

    def loader():
        return build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=1)

    undisturbed, stopped, resumed = loader(), loader(), loader()
    expected = [next(undisturbed)["input_ids"].tolist() for _ in range(60)]
    for _ in range(25):
        next(stopped)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [next(resumed)["input_ids"].tolist() for _ in range(35)] == expected[25:]
    for each in (undisturbed, stopped, resumed):
        each.close()


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"a.txt": "one", "b.json": "{"}, "sample b: not JSON"),
        ({"a.jpg": "one"}, "sample a: no field text, but jpg"),
    ],
)
def test_a_fault_of_a_shard_names_the_sample(tmp_path, files, fault):
    write_shard(tmp_path / "a.tar", files)
    with pytest.raises(ValueError, match=fault):
        check_source(DataConfig(kind=DataKind.text, path=str(tmp_path / "a.tar")))


def test_a_file_that_is_no_shard_is_named(tmp_path):
    (tmp_path / "a.tar").write_text("no archive" * 100)
    with pytest.raises(ValueError, match=r"not a tar archive .*; write it again"):
        check_source(DataConfig(kind=DataKind.text, path=str(tmp_path / "a.tar")))


@pytest.mark.parametrize("url", ["memory://nothing/here", "memory://nothing/*.jsonl", "nostorage://a/b.jsonl"])
def test_a_missing_url_is_an_error_before_the_start(url):
    with pytest.raises(ValueError, match=r"data.path=.*check the address"):
        check_source(DataConfig(kind=DataKind.text, path=url))


def test_a_changed_object_is_tokenised_again(tmp_path, tokenizer):
    storage = fsspec.filesystem("memory")
    config = DataConfig(
        kind=DataKind.text, path="memory://changes/a.jsonl", sequence_length=64, cache_dir=str(tmp_path)
    )
    for texts in (["one"], ["one", "two"]):
        storage.pipe_file("/changes/a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
        assert ids_of(config, tokenizer) == texts
