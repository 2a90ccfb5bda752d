"""Tensor and sequence parallelism against one process of plain Hugging Face."""

import copy
import dataclasses
import threading

import pytest
import torch

from tests.engine.parallel.members import items_of, micro_batches, require_same, whole_model
from tests.engine.stages.small_configs import small_config
from tests.engine.stages.tiny_models import tiny_model
from weft.conf.schema import LoraConfig, ModelConfig, Recompute, SplitKind
from weft.engine.models.objective import Minimised, Objective, next_token_loss
from weft.engine.models.recomputation import recompute
from weft.engine.parallel.axis import UnshareableError
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.stages.checking.axis_check import check_axes
from weft.engine.stages.checking.comparison import whole_outcome
from weft.engine.stages.checking.members import members_outcome
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers

DEEPSEEK = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip


def wide(arch, **more):
    """A tiny model whose heads, groups of heads and vocabulary four members can divide."""
    return tiny_model(arch, num_key_value_heads=4, **more)


MODELS = {name: wide(name) for name in ("llama", "qwen3", "mistral", "gemma2", "mixtral", "qwen3_moe", "phi3")} | {
    "deepseek_v3": ModelConfig(arch="deepseek_v3", overrides=DEEPSEEK)
}


def require_equal(config, *, stages=1, adjust=lambda model: None, batches=None, **sizes):
    """Losses, logits and gradients of three accumulated micro-batches."""
    model, batches = whole_model(config), batches or micro_batches(3)
    adjust(model)
    want = whole_outcome(model, batches, items_of(batches))
    got = members_outcome(model, batches, items_of(batches), sizes, stages)
    for name, gradient in got.gradients.items():
        if not model.get_parameter(name).requires_grad:
            assert not gradient.any()
    trained = {name: gradient for name, gradient in got.gradients.items() if name in want.gradients}
    require_same(dataclasses.replace(got, gradients=trained), want)


@pytest.mark.parametrize(("members", "stages"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("arch", MODELS)
def test_equal(arch, members, stages):
    require_equal(MODELS[arch], stages=stages, tensor=members)


VARIANTS = {
    "biases": wide("llama", attention_bias=True, mlp_bias=True),
    "tied": wide("llama", tie_word_embeddings=True),
    "router loss": wide("mixtral", output_router_logits=True),
    "padding token": wide("llama", pad_token_id=3),
    "window and packing": wide("mistral"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant):
    given = {"documents": (5, 11)} if "packing" in variant else {"padding": 4}
    count = 1 if variant == "router loss" else 3  # Hugging Face adds it up without weighing micro-batches by tokens
    require_equal(VARIANTS[variant], stages=2, tensor=2, batches=micro_batches(count, **given))


def test_adapters():
    """With a column-wise base B is cut, with a row-wise one A; the other factor is held in full."""
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    lora = LoraConfig(enabled=True, rank=4, dropout=0.0, target_modules=targets)
    require_equal(dataclasses.replace(wide("llama"), lora=lora), stages=2, tensor=2)


def test_gradient_checkpointing():
    require_equal(wide("llama"), stages=2, tensor=2, adjust=lambda model: recompute(model, Recompute.layers))


def test_with_context():
    require_equal(wide("qwen3"), tensor=2, context=2)


def test_each_holds_its_part_only():
    model = whole_model(wide("llama"))

    def member(axes):
        with making:
            (stage,) = stages_from_model(copy.deepcopy(model), split_layers(model.config, 1, SplitKind.even), [0], axes)
        found = {name: parameter.detach() for name, parameter in stage.named_global_parameters()}
        assert all(tuple(found[name].shape) == cut.held_shape for name, cut in stage.cuts.items())
        assert all(torch.equal(found[name], cut.take(model.get_parameter(name))) for name, cut in stage.cuts.items())
        full = {name.split(".")[-2] for name in found if name not in stage.cuts}
        assert full == {"input_layernorm", "post_attention_layernorm", "norm"}
        assert stage.hidden_spec(micro_batches(1)[0])[0] == (2, 8, 32)
        return sum(tensor.numel() for tensor in found.values())

    making = threading.Lock()
    held = run_in_threads({"tensor": 2}, member)
    norms = 32 * (2 * len(model.model.layers) + 1)
    assert held == [(sum(p.numel() for p in model.parameters()) - norms) // 2 + norms] * 2


def test_an_objective_sees_all_logits():
    """A loss of one's own, on logits over the whole vocabulary, and its gradients."""
    model, (batch,) = whole_model(wide("llama")), micro_batches(1)
    items = items_of([batch])
    want = whole_outcome(model, [batch], items, next_token_loss)

    def member(axes):
        with making:
            (stage,) = stages_from_model(copy.deepcopy(model), split_layers(model.config, 1, SplitKind.even), [0], axes)
        stage.objective = Minimised(Objective.of(next_token_loss))
        loss = stage(None, batch, items)
        loss.backward()
        gradients = {name: p.grad for name, p in stage.named_global_parameters()}
        return loss.detach(), {name: cut.take(want.gradients[name]) for name, cut in stage.cuts.items()}, gradients

    making = threading.Lock()
    for loss, wanted, gradients in run_in_threads({"tensor": 2}, member):
        torch.testing.assert_close(loss, want.loss)
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("config", "members", "message"),
    [
        (tiny_model("llama"), 4, r"parallel.tensor=4: LlamaForCausalLM has num_key_value_heads=2"),
        (tiny_model("gpt2"), 2, "no tensor-parallel plan for the layers of GPT2LMHeadModel"),
        (wide("llama", vocab_size=97), 2, r"embed_tokens.weight has 97 tokens.*vocab_size=98"),
        (wide("mixtral", router_jitter_noise=0.1), 2, "router_jitter_noise=0"),
    ],
)
def test_refused(config, members, message):
    with pytest.raises(UnshareableError, match=message):
        check_axes(config, tensor=members)


@pytest.mark.parametrize(
    ("arch", "what"),
    [
        ("doge", r"model.layers.0.self_attn \(DogeAttention\) .* weights next to its matrices \(A\), which are not"),
        ("gemma3n_text", "its layers hand on hidden states of 4 dimensions"),
        ("gemma4_text", r"model.layers.0 \(Gemma4TextDecoderLayer\) computes with hidden states alongside its parts"),
    ],
)
def test_what_a_model_does_that_members_cannot_share_is_named(arch, what):
    with pytest.raises(ValueError, match=f"^parallel.tensor=2: .*{what}.*; set parallel.tensor=1") as caught:
        check_axes(small_config(arch), tensor=2)
    assert "size of tensor" not in str(caught.value)


@pytest.mark.parametrize("arch", ["llama", "olmo2", "glm"])
def test_checked_before_start(arch):
    check_axes(small_config(arch), tensor=2)


def test_sequences_that_cannot_be_divided():
    with pytest.raises(UnshareableError, match="15 tokens in a sequence"):
        members_outcome(whole_model(wide("llama")), micro_batches(1, length=15), torch.tensor(1), {"tensor": 2})


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_over_the_vocabulary_is_refused(target):
    lora = LoraConfig(enabled=True, rank=4, dropout=0.0, target_modules=["q_proj", target])
    with pytest.raises(UnshareableError, match=r"has an adapter.*model\.lora\.target_modules"):
        require_equal(dataclasses.replace(wide("llama"), lora=lora), stages=1, tensor=2)
