"""Names of data with characters of patterns: an existing file or folder is meant literally."""

import gzip
import json

import fsspec
import pytest

from weft.conf import load
from weft.conf.schema import DataConfig, DataKind
from weft.engine.data import build_loader, check_source, encode_first, open_source
from weft.engine.data.storage import open_file, suffix_of

NAMES = ["a[1]", "a*b", "what?", "[ab]", "x::y", "a (1)", "it's", "a&b", "100%", "a=b"]


def texts(config, tokenizer):
    check_source(config)
    loader = build_loader(config, tokenizer, microbatch_size=1, replica=0, num_replicas=1, seed=0)
    found = [tokenizer.decode(next(loader)["input_ids"][0], skip_special_tokens=True) for _ in range(2)]
    loader.close()
    return found


def data(tmp_path, path, **more):
    plain = {"sequence_length": 64, "packing": False, "shuffle": False, "cache_dir": str(tmp_path / "cache")}
    return DataConfig(kind=DataKind.text, path=str(path), **(plain | more))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("streaming", [False, True])
def test_folders_and_files_are_read_by_their_names(tokenizer, tmp_path, name, streaming):
    folder = tmp_path / name / name
    folder.mkdir(parents=True)
    for number, part in enumerate(("a", "b")):
        (folder / f"{name.replace('::', '-')} {part}.jsonl").write_text(json.dumps({"text": f"it is {number}."}) + "\n")
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1" / "other.jsonl").write_text("not JSON")
    assert texts(data(tmp_path, folder, streaming=streaming), tokenizer) == ["it is 0.", "it is 1."]
    one = data(tmp_path, folder / f"{name.replace('::', '-')} b.jsonl", streaming=streaming)
    assert texts(one, tokenizer) == ["it is 1."] * 2


def test_splits_of_such_a_folder_are_found_by_their_names(tokenizer, tmp_path):
    folder = tmp_path / "set[1]"
    for split in ("train", "test"):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "data" / f"{split}-00.jsonl").write_text(json.dumps({"text": split}) + "\n")
    assert texts(data(tmp_path, folder), tokenizer) == ["train"] * 2
    assert tokenizer.decode(encode_first(data(tmp_path, folder, split="test"), tokenizer).ids[1:-1]) == "test"


def test_files_of_a_folder_are_read_whatever_the_case_of_their_suffix(tokenizer, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a.JSONL", "b.jsonl", "c.Jsonl"):
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    check_source(data(tmp_path, folder))
    source = open_source(data(tmp_path, folder), tokenizer, evaluation=False)
    assert "3 documents" in source.description


@pytest.mark.parametrize("pattern", ["data/train.JSONL", "data/*.JSONL", "data/train.*"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_readme_names_files_whatever_the_case_of_their_suffix(tokenizer, tmp_path, pattern, streaming):
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    front = {"configs": [{"config_name": "main", "data_files": [{"split": "train", "path": pattern}]}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(front)}\n---\n# A set\n")
    for name in ("train.JSONL", "other.jsonl"):
        (folder / "data" / name).write_text(json.dumps({"text": name}) + "\n")
    assert texts(data(tmp_path, folder, streaming=streaming), tokenizer) == ["train.JSONL"] * 2


def test_files_that_differ_in_the_case_of_their_suffix_are_both_read(tokenizer, tmp_path):
    for name in ("a.JSONL", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert sorted(texts(data(tmp_path, tmp_path), tokenizer)) == ["a.JSONL", "a.jsonl"]


@pytest.mark.parametrize("url", ["memory://literal{}", "file://{}"])
def test_a_url_is_a_pattern_only_if_it_names_nothing(tokenizer, tmp_path, url):
    root = url.format(tmp_path)
    storage, folder = fsspec.core.url_to_fs(root)
    storage.makedirs(f"{folder}/s[1]", exist_ok=True)
    for name in ("s[1]/a.jsonl", "s1.jsonl", "s[1].jsonl"):
        storage.pipe_file(f"{folder}/{name}", json.dumps({"text": name}).encode() + b"\n")
    assert texts(data(tmp_path, f"{root}/s[1].jsonl"), tokenizer)[0] == "s[1].jsonl"
    assert texts(data(tmp_path, f"{root}/s[1]"), tokenizer)[0] == "s[1]/a.jsonl"
    assert texts(data(tmp_path, f"{root}/s[12].jsonl"), tokenizer)[0] == "s1.jsonl"


@pytest.mark.parametrize("rest", ["", "/", "/tree/main/data", "/blob/main/train.jsonl"])
def test_the_page_of_a_data_set_is_refused_with_its_name(tmp_path, rest):
    with pytest.raises(ValueError, match=r"a page about a data set; give its hub name, data\.path=owner/some-set$"):
        check_source(data(tmp_path, f"https://huggingface.co/datasets/owner/some-set{rest}"))


def test_parameters_of_a_web_address_are_no_suffix():
    assert suffix_of("https://host/a.JSONL?sig=x.y&b=1#c") == ".jsonl"
    assert suffix_of("s3://bucket/a?b.parquet") == ".parquet"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "a=b"])
def test_such_names_need_no_quotes_on_the_command_line(name):
    config = load(["data.kind=text", "model.path=/m", f"data.path=/data/{name}/x.jsonl"])
    assert config.data.path == f"/data/{name}/x.jsonl"


def test_compressed_files_are_recognised_by_their_names(tmp_path):
    with gzip.open(tmp_path / "a[1].json.gz", "wb") as file:
        file.write(b"{}")
    with open_file(tmp_path / "a[1].json.gz") as file:
        assert file.read() == b"{}"
