"""Tokens without rows, and weights that are missing or misshapen, are named before any process starts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.stages.tiny import ARCHITECTURES, tiny, whole
from weft.conf import load
from weft.conf.schema import ModelConfig
from weft.engine.data.tokenizer import train_bpe
from weft.engine.stages.files.loading import check_model_fits
from weft.tools.preflight import check_data, check_model

WORDS = ["how many are 3 and 4? there are 7."] * 20


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer of as many tokens as it has rows, and texts."""
    tokenizer = train_bpe(WORDS, 300)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in WORDS))
    return tmp_path


def settings(folder, *more):
    data = ["data.kind=text", f"data.path={folder / 'data.jsonl'}", "data.sequence_length=16"]
    return load([f"model.path={folder / 'model'}", *data, f"data.cache_dir={folder / 'cache'}", *more])


def test_as_many_tokens_as_rows_are_accepted(folder):
    check_model(settings(folder))
    check_data(settings(folder))


def test_a_split_for_evaluation_that_is_not_there_is_refused(folder):
    evaluated = ["data.eval_split=test", "train.eval_every=1"]
    text = r"^data\.path=.*: split 'test' cannot be read \(there is train\); check .* data\.eval_split"
    with pytest.raises(ValueError, match=text):
        check_data(settings(folder, *evaluated))
    check_data(settings(folder, "data.eval_split=test"))
    check_data(settings(folder, "data.eval_split=train", "train.eval_every=1"))


SAME = {"text": WORDS[0]}
SHARES = {
    "one row": ([SAME], ["data.eval_fraction=0.1"], "no documents for training among 1 rows; give more"),
    "equal rows": ([SAME] * 9, ["data.eval_fraction=0.1"], "no documents for training among 9 rows; give more"),
    "stream": ([SAME] * 9, ["data.streaming=true", "data.eval_fraction=1e-6"], "for evaluation among 9 rows; give"),
    "split": ([{"text": ""}] * 2, ["data.eval_split=test"], "no documents with something to learn among its 2 rows"),
}


@pytest.mark.parametrize("case", SHARES)
def test_a_share_without_rows_is_refused(case, folder):
    rows, more, text = SHARES[case]
    (folder / "data").mkdir()
    for name, written in (("train", [SAME] if case == "split" else rows), ("test", rows)):
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    given = [f"data.path={folder / 'data'}", "train.eval_every=1", *more]
    with pytest.raises(ValueError, match=text):
        check_data(settings(folder, *given))
    check_data(settings(folder, *given, "data.eval_fraction=0", "data.eval_split=", "train.eval_every=0"))


@pytest.mark.parametrize("where", ["model", "tokenizer"])
def test_tokens_without_rows_are_refused_with_both_numbers(where, folder):
    tokenizer = train_bpe(WORDS, 300)
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad_that_was_added>"})
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder / where)
    more = [] if where == "model" else [f"model.tokenizer={folder / where}"]
    field = "path" if where == "model" else "tokenizer"
    text = rf"^model\.{field}=.*: the tokenizer has {rows + 2} tokens and the model {rows} rows .*pad_that_was_added"
    with pytest.raises(ValueError, match=text):
        check_data(settings(folder, *more))


def test_too_few_rows_of_a_new_model_are_refused(folder):
    config = settings(folder, f"model.tokenizer={folder / 'model'}", "model.overrides.vocab_size=100")
    config.model.path = ""
    with pytest.raises(ValueError, match=r"^model\.overrides\.vocab_size=100: the tokenizer has \d+ tokens"):
        check_data(config)


def test_padding_token_without_a_row_is_refused(folder):
    with pytest.raises(ValueError, match=r"pad_token_id=9999, and the model has \d+ rows"):
        check_model(settings(folder, "model.overrides.pad_token_id=9999"))


def changed(tensors, name):
    yield "is missing", {key: value for key, value in tensors.items() if key != name}
    yield r"has shape \[47, 32\], not \[48, 32\]", tensors | {name: tensors[name][:-1].contiguous()}
    yield r"has shape \[32, 48\], not \[48, 32\]", tensors | {name: tensors[name].T.contiguous()}


def test_missing_and_misshapen_weights_are_named(folder):
    file, name = folder / "model" / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    for text, tensors in changed(load_file(file), name):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"^model\.path=.*: {name} {text}; "):
            check_model(settings(folder))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_whole_folders_of_all_architectures_are_accepted(arch, tied, tmp_path):
    whole(tiny(arch, tie_word_embeddings=tied), dtype=torch.bfloat16).save_pretrained(tmp_path)
    check_model_fits(ModelConfig(path=str(tmp_path)), 2, 16)
