"""The loss in chunks against Hugging Face's loss from whole logits: values, gradients, splits, members, memory."""

import copy
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.parallel.members import items_of, micro_batches
from weft.conf.schema import LoraConfig, SplitKind
from weft.engine.backward import SplitBackward
from weft.engine.models import lazy_logits
from weft.engine.models.head_loss import HeadLoss
from weft.engine.models.lora import add_adapters
from weft.engine.parallel.axis import Alone
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.port import Port
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.cutting.stage import Stage

VOCABULARY, CHUNK = 96, 1600
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HEADS = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "softcap": ("gemma2", {"final_logit_softcapping": 0.5}),
    "scaled": ("cohere", {"logit_scale": 3.0}),
    "divided": ("granite", {"logits_scaling": 0.3}),
    "bias": ("phi", {}),
}


def build(head="plain", dtype=torch.float32):
    arch, more = HEADS[head]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **SHAPE, **more), dtype=dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def stage_of(model, chunk_bytes):
    stage = Stage(model, index=0, num_stages=1, port=Port())
    stage.compute_loss_in_chunks(chunk_bytes)
    return stage


def trained(stage, batch, items):
    """The loss, the gradients by name, and the bytes between I and W."""
    backward = SplitBackward(stage)
    loss, saved = backward.forward(lambda: stage(None, batch, items), None)
    backward.input_backward(saved, torch.full_like(loss, 2.0))
    kept = saved.kept_bytes
    backward.weight_backward(saved)
    return loss.detach(), {name: p.grad for name, p in stage.named_global_parameters() if p.grad is not None}, kept


@pytest.fixture
def never_whole(monkeypatch):
    def whole(self, hidden, what):
        raise AssertionError(f"whole logits for {what}")

    monkeypatch.setattr(lazy_logits.LazyHead, "whole", whole)


def chunked(model, batch, items):
    return trained(stage_of(model, CHUNK), batch, items)


@pytest.mark.parametrize("head", HEADS)
def test_chunks_equal_hugging_faces_loss_and_split_backwards_equal_whole_ones(head, never_whole):
    model, (batch,) = build(head), micro_batches(1)
    for items in (items_of([batch]), None):
        want, expected, whole_bytes = trained(stage_of(copy.deepcopy(model), 0), batch, items)
        got, gradients, kept_bytes = chunked(copy.deepcopy(model), batch, items)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() < 5e-6 * expected[name].norm(), name
        assert kept_bytes < whole_bytes - 4 * batch["labels"].numel() * (VOCABULARY - 2)
        plain = stage_of(copy.deepcopy(model), CHUNK)
        loss = plain(None, batch, items)
        loss.backward(torch.full_like(loss, 2.0))
        at_once = dict(plain.named_global_parameters())
        assert torch.equal(got, loss)
        assert all(torch.equal(gradient, at_once[name].grad) for name, gradient in gradients.items())


@pytest.mark.parametrize("head", ["plain", "softcap"])
def test_in_bf16_chunks_are_as_exact_as_whole_logits(head, never_whole):
    (batch,) = micro_batches(1)
    model, items = build(head, torch.bfloat16), items_of([batch])
    want, exact, _ = trained(stage_of(copy.deepcopy(model).float(), 0), batch, items)
    errors = []
    for chunk_bytes in (0, CHUNK):
        loss, gradients, _ = trained(stage_of(copy.deepcopy(model), chunk_bytes), batch, items)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, want, rtol=1e-3, atol=0)
        errors.append(sum((gradients[name].float() - exact[name]).norm() / exact[name].norm() for name in exact))
    assert errors[1] < 1.1 * errors[0]


def tensors(rows, width, words, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(size, generator=generator) for size in ((rows, width), (words, width)))
    labels = torch.randint(words, (rows,), generator=generator).where(torch.rand(rows, generator=generator) < 0.8, -1)
    return hidden, weight, torch.randn(words, generator=generator), labels, torch.rand(rows, generator=generator)


@given(
    rows=st.integers(1, 9),
    words=st.integers(2, 40),
    chunk_bytes=st.integers(1, 800),
    bias=st.booleans(),
    steps=st.sampled_from([(), (torch.tanh,), (lambda logits: logits * 0.3, torch.tanh, lambda logits: logits * 2)]),
    seed=st.integers(0, 999),
)
def test_any_chunk_has_the_loss_and_gradients_of_cross_entropy(rows, words, chunk_bytes, bias, steps, seed):
    hidden, weight, offset, labels, weights = tensors(rows, 5, words, seed)
    leaves = [tensor.requires_grad_() for tensor in ((hidden, weight, offset) if bias else (hidden, weight))]
    logits = F.linear(*leaves)
    for step in steps:
        logits = step(logits)
    want = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    expected = torch.autograd.grad((want * weights).sum(), leaves)
    product = HeadLoss(
        weight=weight, bias=offset if bias else None, labels=labels, ignore_index=-1, steps=steps,
        chunk_bytes=chunk_bytes, group=Alone("tensor"), differentiable=True, complete=torch.no_grad,
    )  # fmt: skip
    got = product.forward(hidden)
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)
    found = product.input_gradient(weights), *product.parameter_gradients(hidden.detach(), weights)
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """Records the most elements of any tensor."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), 0)
        return out


def test_logits_never_exist_as_a_whole():
    (batch,), model = micro_batches(1, rows=8), build()
    logits = batch["labels"].numel() * VOCABULARY
    for chunk_bytes in (0, CHUNK):
        stage = stage_of(copy.deepcopy(model), chunk_bytes)
        with Largest() as largest:
            trained(stage, batch, items_of([batch]))
        with torch.no_grad(), Largest() as evaluated:
            stage(None, batch, items_of([batch]))
        for seen in (largest, evaluated):
            assert seen.most == logits if not chunk_bytes else seen.most < logits


@pytest.mark.parametrize("head", ["plain", "tied", "softcap"])
def test_members_share_the_vocabulary(head, never_whole):
    model, (batch,) = build(head), micro_batches(1)
    items, making = items_of([batch]), threading.Lock()
    want, expected, _ = trained(stage_of(copy.deepcopy(model), 0), batch, items)

    def member(axes):
        with making:
            (stage,) = stages_from_model(copy.deepcopy(model), split_layers(model.config, 1, SplitKind.even), [0], axes)
        stage.compute_loss_in_chunks(CHUNK / 2)
        loss, gradients, _ = trained(stage, batch, items)
        return loss, gradients, stage.cuts

    for loss, gradients, cuts in run_in_threads({"tensor": 2}, member):
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
        for name, cut in ((name, cut) for name, cut in cuts.items() if name in expected):  # without tied names
            torch.testing.assert_close(gradients[name], cut.take(expected[name]), rtol=1e-4, atol=1e-6)


def test_a_frozen_head_has_no_weight_gradient(monkeypatch, never_whole):
    (batch,) = micro_batches(1)
    monkeypatch.setattr(HeadLoss, "parameter_gradients", lambda *_: pytest.fail("computed"))
    model = add_adapters(build(), LoraConfig(enabled=True, rank=2), seed=0)
    assert chunked(model, batch, items_of([batch]))[1]


def test_micro_batches_within_a_chunk_are_computed_by_the_models_own_code(monkeypatch):
    (batch,) = micro_batches(1)
    monkeypatch.setattr(lazy_logits.LazyHead, "deferred", lambda _: pytest.fail("lazy"))
    stage_of(build(), 4 * batch["labels"].numel() * VOCABULARY)(None, batch, items_of([batch]))


def test_heads_that_are_not_understood_compute_whole_logits_and_name_the_reason(caplog):
    (batch,) = micro_batches(1)
    items, caplog.handler.level = items_of([batch]), logging.INFO
    caplog.set_level(logging.INFO, logger="weft")
    expected = stage_of(build(), 0)(None, batch, items)
    other = build()
    other.lm_head = type("Head", (nn.Linear,), {})(32, VOCABULARY, bias=False)
    other.lm_head.weight = build().lm_head.weight
    assert torch.equal(stage_of(other, CHUNK)(None, batch, items), expected)
    assert "LlamaForCausalLM: logits are computed whole, because its head is Head" in caplog.text
    sorting = build()
    own = sorting.forward

    def forward(**inputs):
        labels, items = inputs.pop("labels"), inputs.pop("num_items_in_batch")
        output = own(**inputs)
        output.logits = output.logits.clamp(max=100.0)
        output.loss = sorting.loss_function(output.logits, labels, vocab_size=VOCABULARY, num_items_in_batch=items)
        return output

    sorting.forward = forward
    assert torch.equal(stage_of(sorting, CHUNK)(None, batch, items), expected)
    assert "because the model's forward calls clamp" in caplog.text


def test_a_label_outside_of_the_vocabulary_is_an_error():
    (batch,) = micro_batches(1)
    batch["labels"][0, 3] = VOCABULARY
    with pytest.raises(RuntimeError, match="not in the vocabulary"):
        stage_of(build(), CHUNK)(None, batch, items_of([batch]))
