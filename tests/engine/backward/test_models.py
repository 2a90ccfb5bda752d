"""Gradients of the split backward against plain autograd, on Hugging Face models."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.shapes import sizes
from weft.engine.backward import SplitBackward

TINY = sizes(
    hidden=32, inner=48, layers=2, heads=4, groups=2, words=64, head_dim=8, max_position_embeddings=64, pad_token_id=0
)
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gemma2": ("gemma2", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", MOE),
    "mixtral_eager": ("mixtral", MOE | {"experts_implementation": "eager"}),
    "mixtral_batched": ("mixtral", MOE | {"experts_implementation": "batched_mm"}),
    "qwen3_moe": ("qwen3_moe", MOE),
}


class Causal(nn.Module):
    """A whole model as one stage: hidden states are its input embeddings."""

    def __init__(self, model, ids):
        super().__init__()
        self.model, self.ids = model, ids

    def forward(self, hidden=None):
        tokens = {"input_ids": self.ids} if hidden is None else {"inputs_embeds": hidden}
        return self.model(**tokens, labels=self.ids, use_cache=False).loss


def build(name, *, dtype=torch.float32, lora=False, checkpointing=False):
    arch, extra = MODELS[name]
    torch.manual_seed(0)
    extra = dict(extra)
    experts = {k: extra.pop(k) for k in ("experts_implementation",) if k in extra}
    if arch == "gpt2":
        config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    else:
        config = AutoConfig.for_model(arch, **(TINY | extra))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **experts)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(parameter)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.randint(1, 64, (2, 12))
    return Causal(model, ids)


def plain(stage, hidden):
    loss = stage(hidden)
    loss.backward()
    return loss.detach()


def gradients(stage):
    found = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    for p in stage.parameters():
        p.grad = None
    return found


def hidden_of(stage, use_hidden):
    if not use_hidden:
        return None
    weight = stage.model.get_input_embeddings().weight
    torch.manual_seed(1)
    return torch.randn(2, 12, weight.shape[1], dtype=weight.dtype).requires_grad_()


def check(stage, *, use_hidden, exact=True):
    hidden = hidden_of(stage, use_hidden)
    want_loss = plain(stage, hidden)
    want = gradients(stage)
    split = SplitBackward(stage)
    again = hidden_of(stage, use_hidden)
    loss, saved = split.forward(lambda: stage(again), again)
    assert torch.equal(loss.detach(), want_loss)
    assert saved.holds_activation
    assert saved.activation_bytes > 0
    below = split.input_backward(saved, torch.ones_like(loss))
    early = {n for n, p in stage.named_parameters() if p.grad is not None}
    assert early == {n for n in want if n in split.unsplit}
    assert saved.kept_bytes > 0
    split.weight_backward(saved)
    assert saved.kept_bytes == 0
    got = gradients(stage)
    assert got.keys() == want.keys()
    if use_hidden:
        torch.testing.assert_close(below, hidden.grad, rtol=0, atol=0) if exact else torch.testing.assert_close(
            below, hidden.grad
        )
    for name, grad in want.items():
        if exact:
            assert torch.equal(got[name], grad), (name, (got[name] - grad).abs().max())
        else:
            torch.testing.assert_close(got[name], grad, msg=lambda m, name=name: f"{name}: {m}")
    return split


@pytest.mark.parametrize("use_hidden", [False, True], ids=["tokens", "hidden"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name, use_hidden):
    split = check(build(name), use_hidden=use_hidden)
    aside = ("norm", "ln_", *(("embed_tokens", "wte") if use_hidden else ()))
    unsplit = [n for n in split.unsplit if not any(part in n for part in aside)]
    if name == "mixtral_batched":
        assert unsplit and all("experts" in n for n in unsplit)
    else:
        assert unsplit == []


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gemma2", "mixtral", "mixtral_eager"])
def test_checkpointing(name):
    check(build(name, checkpointing=True), use_hidden=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma2"])
def test_bf16(name):
    check(build(name, dtype=torch.bfloat16), use_hidden=True)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(checkpointing):
    stage = build("llama", lora=True, checkpointing=checkpointing)
    if checkpointing:
        stage.model.enable_input_require_grads()
    check(stage, use_hidden=False)
