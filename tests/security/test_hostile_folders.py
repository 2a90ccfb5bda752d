"""Files of a model or of DeepSpeed that are nested without end are refused in one line."""

import json
import struct

import pytest

from weft.conf.schema import DataConfig, DataKind, ModelConfig
from weft.engine.data import encode_first
from weft.engine.data.tokenizer import load_tokenizer, train_bpe
from weft.engine.deepspeed.keys import split_deepspeed_config
from weft.engine.stages.files.folder import require_whole_folder

DEEP = b"[" * 100_000


def refused(action, part):
    with pytest.raises(ValueError, match=part) as caught:
        action()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", len(DEEP)) + DEEP,
        struct.pack("<Q", 50_000 * 6) + b'{"a":' * 50_000 + b"}" * 50_000,
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 32) + b'{"a": {"data_offsets": [0,"x"]}}',
    ],
    ids=["brackets", "metadata", "a length beyond any file", "an offset that is text"],
)
def test_a_hostile_header_of_safetensors_is_refused(tmp_path, header):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(header)
    refused(lambda: require_whole_folder(tmp_path), "is not a safetensors file")


def test_a_header_is_not_read_further_than_safetensors_allows(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate((1 << 40) + 8)  # sparse
    refused(lambda: require_whole_folder(tmp_path), "is not a safetensors file")


def test_a_nested_index_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_bytes(DEEP)
    refused(lambda: require_whole_folder(tmp_path), "cannot be read .nested too deep.")


def test_a_nested_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(DEEP)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    refused(lambda: load_tokenizer(ModelConfig(tokenizer=str(tmp_path)), DataConfig()), "no tokenizer can be loaded")


@pytest.mark.parametrize("kind", ["text", "chat", "preference"])
def test_a_pattern_that_takes_endless_trials_is_refused(tmp_path, kind):
    train_bpe(["a b"], 260).save_pretrained(tmp_path)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, rules["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    text = 40 * "a" + "b"
    row = {"text": text, "prompt": "b", "completion": text, "chosen": text, "rejected": "b"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = DataConfig(kind=DataKind[kind], path=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path), packing=False)
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(tmp_path)), data)
    refused(
        lambda: encode_first(data, tokenizer), r"the tokenizer cannot encode a text \(Onig.*retry-limit.*tokenizer.json"
    )


def test_a_nested_deepspeed_configuration_is_refused(tmp_path):
    (tmp_path / "ds.json").write_bytes(DEEP)
    refused(lambda: split_deepspeed_config(tmp_path / "ds.json"), "not JSON")
