"""Recomputed attention and element-wise operations: the same gradients, and the bytes that the plan predicts."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.backward.test_models import build, gradients, hidden_of
from weft.conf.schema import Recompute
from weft.engine.backward import SplitBackward
from weft.engine.models.recomputation import recompute, require_attention
from weft.engine.models.tracing import trace_model

MODELS = ("llama", "gpt2", "gemma2", "mixtral", "qwen3_moe")
KINDS = (Recompute.none, Recompute.attention, Recompute.elementwise, Recompute.layers)


def dropping(stage, share):
    for module in stage.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = share


@pytest.mark.parametrize(("name", "dropout"), [*((name, 0.0) for name in MODELS), ("gpt2", 0.2), ("llama", 0.2)])
@pytest.mark.parametrize("split", [False, True])
def test_recomputation_leaves_losses_and_gradients_equal(name, dropout, split):
    found, saved_bytes, kept, drawn = [], [], [], []
    for kind in KINDS:
        stage = build(name)
        dropping(stage, dropout)
        recompute(stage.model, kind)
        hidden = hidden_of(stage, use_hidden=True)
        backward = SplitBackward(stage)
        torch.manual_seed(3)
        loss, saved = backward.forward(lambda: stage(hidden), hidden, split=split)  # noqa: B023
        saved_bytes.append(saved.activation_bytes)
        backward.input_backward(saved, torch.ones_like(loss))
        kept.append(saved.kept_bytes)
        backward.weight_backward(saved)
        found.append((loss.detach(), hidden.grad, gradients(stage)))
        drawn.append(torch.get_rng_state())
    none, attention, elementwise, layers = saved_bytes
    assert none > attention > layers and none > elementwise > layers
    assert all(torch.equal(state, drawn[0]) for state in drawn)
    assert len(set(kept)) == 1, "what waits for W does not depend on it"
    for loss, below, weights in found[1:]:
        assert torch.equal(loss, found[0][0]) and torch.equal(below, found[0][1])
        assert all(torch.equal(weights[name], want) for name, want in found[0][2].items())


def test_traced_bytes_of_attention_are_those_that_recomputation_saves():
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model("llama", num_attention_heads=4, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids = torch.arange(256).view(1, -1) % 64
    measured = []
    for kind in (Recompute.none, Recompute.attention):
        recompute(model, kind)
        output, saved = SplitBackward(model).forward(lambda: model(ids, use_cache=False).logits, None, split=False)
        measured.append(saved.activation_bytes)
        del output
    work = trace_model(config, 256, dtype=torch.float32)
    expected = sum(layer.attention_bytes for layer in work.layers)
    freed = measured[0] - measured[1]
    # Queries, keys, values, output and sums of each layer; the CPU's kernel saves a copy of the output and more.
    assert expected == 4 * 2 * 256 * 256 * 4 + 2 * 4 * 256 * 4
    assert expected <= freed <= 1.35 * expected
    of_products = 4 * 256 * 256 * 2 * 256
    assert work.layers[0].attention_matmul_flops == of_products


def test_a_model_without_attention_is_refused_by_name():
    class Plain(nn.Module):
        base_model_prefix = ""

    model = build("llama").model
    for layer in model.model.layers:
        layer.self_attn = Plain()
    with pytest.raises(ValueError, match=r"pipeline.recompute=attention: LlamaForCausalLM has no module"):
        require_attention(model)
