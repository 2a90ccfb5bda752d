"""Tests that tracing without weights equals vendors' figures and torch's counts with weights."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from tests.shapes import sizes
from weft.engine.models.tracing import trace_model
from weft.pipeline.workload import LOSS_BYTES

MODELS = Path(__file__).parents[3] / "examples" / "models"
PUBLISHED = {
    # billions of weights and of those that a token meets, embedding included, as the model cards and reports have them
    "llama-8b": (8.03, 8.03),
    "llama-70b": (70.55, 70.55),
    "llama-405b": (405.9, 405.9),
    "qwen3-32b": (32.8, 32.8),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v3": (671.0, 37.55),
}
SEQUENCE = 4096


def config_of(name):
    return AutoConfig.for_model(**json.loads((MODELS / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_and_the_standard_operations(name):
    config = config_of(name)
    work = trace_model(config, SEQUENCE)
    total, active = PUBLISHED[name]
    embedding = config.vocab_size * config.hidden_size
    assert work.parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert (work.active_parameters + embedding) / 1e9 == pytest.approx(active, rel=0.01)
    # 6 per active weight, and 12 x layers x width x length of attention, of which a causal mask leaves half.
    keys = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or 0
    values = getattr(config, "v_head_dim", None) or keys
    keys, values = (width or config.hidden_size // config.num_attention_heads for width in (keys, values))
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * (keys + values) / 2 * SEQUENCE
    assert work.flops_per_token == pytest.approx(6 * active * 1e9 - 6 * embedding + attention, rel=0.01)


SIZES = sizes(hidden=48, inner=80, layers=2, heads=4, groups=2, words=97)
SMALL = {
    "llama": LlamaConfig(num_key_value_heads=2),
    "tied": LlamaConfig(tie_word_embeddings=True),
    "qwen3": Qwen3Config(head_dim=24),
    "gpt2": GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=97),
    "mixtral": MixtralConfig(num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", SMALL)
def test_torch_counts_the_same_with_weights(name):
    config = SMALL[name]
    if name != "gpt2":
        for field, value in SIZES.items():
            setattr(config, field, value)
    work = trace_model(config, 32, dtype=torch.float32)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    assert work.parameters == sum(weight.numel() for weight in model.parameters())
    if hasattr(config, "num_local_experts"):
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(32)[None] % 97, use_cache=False).logits.sum().backward()
    pairs = 32 * 33 / 2  # that a causal mask leaves, of 32 x 32
    attention = work.whole.attention_flops * (32 * 32 / pairs)
    assert 3 * (work.whole.matmul_flops + attention) == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_saved_activations_are_those_of_autograd():
    config = Qwen3Config(head_dim=24, **SIZES)
    work = trace_model(config, 32, dtype=torch.float32)
    config._attn_implementation = "sdpa"
    layer = AutoModelForCausalLM.from_config(config)
    known = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    found = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        layer(input_ids=torch.ones(1, 32, dtype=torch.long), use_cache=False)
    loss = 32 * config.vocab_size * LOSS_BYTES
    positions = 32 * torch.long.itemsize  # which layers get, and autograd does not save
    traced = work.whole.activation_bytes + work.before.shared_bytes - positions - loss
    assert traced == sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), SMALL["gpt2"]], ids=["llama", "gpt2"])
def test_what_a_stage_receives_counts_unless_its_first_layer_saves_it(config, dtype):
    """Some norms save a copy in fp32 instead."""
    model, hidden, saved = AutoModelForCausalLM.from_config(config).to(dtype), [], set()
    decoder_layers = model.get_submodule("transformer.h" if config.model_type == "gpt2" else "model.layers")
    decoder_layers[1].register_forward_pre_hook(
        lambda _, args, options: hidden.extend([*args, options.get("hidden_states")][:1]), with_kwargs=True
    )

    def save(tensor):
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=torch.ones(1, 32, dtype=torch.long), use_cache=False)
    is_saved = hidden[0].untyped_storage().data_ptr() in saved
    received = trace_model(config, 32, dtype=dtype).received.activation_bytes
    assert received == (0 if is_saved else hidden[0].nbytes)


def test_a_sliding_window_leaves_fewer_pairs():
    config = config_of("mixtral-8x7b")
    config.num_hidden_layers = 1
    whole = trace_model(config, 1024).layers[0].attention_flops
    config.sliding_window = 256
    assert trace_model(config, 1024).layers[0].attention_flops == pytest.approx(
        whole * (256 * 1024 - 256 * 255 / 2) / (1024 * 1025 / 2)
    )
