"""Parallel blocks and sliding windows of new models do what their names say, and are refused by name elsewhere."""

import pytest
import torch

from weft.conf.schema import Attention, ModelConfig
from weft.engine.models.block_variants import PARALLEL_BLOCK, SLIDING_WINDOW
from weft.engine.models.skeleton import decoder_layers
from weft.engine.stages.files.loading import build_model, load_hf_config

LAYERS, WINDOW = 3, 4
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def new(arch, **more):
    special = {"rotary_dim": 4} if arch in ("codegen", "gptj") else {}
    special |= {"num_key_value_heads": 2} if arch in (*SLIDING_WINDOW, "stablelm") else {}
    special |= {"pad_token_id": 0} if arch not in ("codegen", "gptj") else {}
    special |= {"head_dim": 8} if arch in ("gemma2", "gemma3_text", "qwen3", "ministral") else {}
    more.setdefault("attn_implementation", Attention.eager)
    return ModelConfig(arch=arch, overrides=SHAPE | special, **more)


def made(config):
    return build_model(config, dtype=torch.float32, seed=0).eval()


def mlp_input_follows_attention(model):
    """True if the first block's MLP has another input when its attention has other weights."""
    block = model.get_submodule(decoder_layers(model))[0]
    parts = dict(block.named_children())
    attention = next(part for name, part in parts.items() if "att" in name and "norm" not in name)
    inputs = []
    parts["mlp"].register_forward_pre_hook(lambda _, given: inputs.append(given[0].clone()))
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        model(ids)
        for weight in attention.parameters():
            weight.mul_(3)
        model(ids)
    return not torch.equal(*inputs)


@pytest.mark.parametrize("arch", PARALLEL_BLOCK)
def test_mlp_of_a_parallel_block_has_the_input_of_its_attention(arch):
    assert not mlp_input_follows_attention(made(new(arch, parallel_block=True)))


def test_mlp_of_other_blocks_follows_their_attention():
    assert mlp_input_follows_attention(made(new("mistral")))


def reach(model):
    """Return how many tokens further on a token still has an effect."""
    with torch.no_grad():
        one = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(0))
        other = one.clone()
        other[0, 0] += 1
        off = (model(one).logits - model(other).logits)[0].abs().amax(-1)
    return int(off.nonzero()[-1])


@pytest.mark.parametrize("arch", SLIDING_WINDOW)
def test_layers_with_a_window_see_as_many_tokens_as_set(arch):
    config = new(arch, sliding_window=WINDOW)
    kinds = getattr(load_hf_config(config), "layer_types", None) or ["sliding_attention"] * LAYERS
    assert "sliding_attention" in kinds
    if "full_attention" in kinds:
        config.overrides["layer_types"] = ["sliding_attention"] * LAYERS
    assert reach(made(config)) == LAYERS * (WINDOW - 1)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            ModelConfig(parallel_block=True),
            r"parallel_block=true: blocks of model\.arch=llama .* of codegen, cohere",
        ),
        (ModelConfig(arch="gpt_neox", sliding_window=8), r"sliding_window=8: .*gpt_neox have no such .* cohere2"),
        (ModelConfig(path="somewhere", sliding_window=8), r"sliding_window=8: the blocks of somewhere"),
        (
            ModelConfig(arch="mistral", sliding_window=8, overrides={"sliding_window": 9}),
            r"sliding_window=8: it sets model\.overrides\.sliding_window",
        ),
    ],
)
def test_what_is_impossible_is_refused_by_name(config, match):
    with pytest.raises(ValueError, match=match):
        load_hf_config(config)
