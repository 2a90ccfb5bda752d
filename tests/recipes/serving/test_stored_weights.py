"""A worker loads the same weights from a checkpoint's files as from the folder that transformers would write."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.engine.checkpoint.ranks_in_threads import in_threads
from weft.conf.schema import ModelConfig
from weft.engine.checkpoint import Piece, open_checkpoint, save
from weft.engine.checkpoint.pieces import share, stored_name
from weft.engine.parallel.cut import Cut

pytest.importorskip("weft.inference", reason="needs the feature prefill")

from weft.inference.worker.stored_weights import LINKS, stored_weights
from weft.recipes.serving.evaluator import write_weights

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = (
    LlamaForCausalLM,
    torch.float32,
    LlamaConfig(vocab_size=40, num_key_value_heads=1, tie_word_embeddings=True, **SIZES),
)
MIXTRAL = MixtralForCausalLM, torch.bfloat16, MixtralConfig(vocab_size=40, num_local_experts=2, **SIZES)
CUT = "model.layers.1.self_attn.q_proj.weight"


def no_links(*_):
    raise OSError("another file system")


@pytest.mark.parametrize("kind", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
@pytest.mark.parametrize("cut", ["", CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_weights_are_those_that_transformers_would_save(kind, cut, links, tmp_path, monkeypatch):
    model = kind[0](kind[2]).to(kind[1])
    base, tokenizer, target = (tmp_path / name for name in ("base", "tokenizer", "target"))
    model.save_pretrained(base)
    tokenizer.mkdir()
    held = []
    for name, tensor in model.named_parameters():
        cuts = [Cut(tuple(tensor.shape), 0, index, 2) for index in range(2)] if name == cut else [None]
        stored = [(f"weight/{name}" if each is None else stored_name(f"weight/{name}", each), each) for each in cuts]
        held += [Piece.whole(at, (tensor if each is None else each.take(tensor)).float()) for at, each in stored]

    def write(ranks):
        return save(tmp_path / "checkpoints", 1, [*share(held, ranks.rank, 3)], {}, ranks=ranks)

    path = in_threads(3, write)[0]
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    write_weights(open_checkpoint(path), ModelConfig(path=str(base)), tokenizer, target)
    shutil.rmtree(path)
    found, expected = dict(stored_weights(target)), load_file(base / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    is_copied = load_file(target / "model.safetensors").keys() if (target / "model.safetensors").exists() else set()
    if links and kind is LLAMA:
        assert is_copied == ({cut} if cut else set()) and len(list((target / LINKS).iterdir())) == 3
    else:
        assert is_copied == expected.keys()
