"""Tests of a model's work: sums of its parts, operations per token, and plain values that come back."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.conf.schema import Recompute
from weft.pipeline.action import Op
from weft.pipeline.workload import (
    CUT_LOSS_WORKING_BYTES,
    GATHERED_WIDTHS,
    INPUT_STATES,
    LOSS_BYTES,
    LOSS_WORKING_BYTES,
    NOTHING,
    Division,
    LayerWork,
    ModelWork,
    loss_work,
)

NAMES = [field.name for field in fields(LayerWork)]
WORKS = st.builds(LayerWork, **{name: st.integers(0, 1000) for name in NAMES})


def model(before, layers, after, tied=0):
    return ModelWork(
        name="made up",
        sequence_length=16,
        before=before,
        layers=tuple(layers),
        after=after,
        tied_parameters=tied,
        message_bytes=1.0,
        attended_bytes=2.0,
    )


@given(WORKS, st.lists(WORKS, min_size=1, max_size=4), WORKS, st.integers(0, 9))
def test_a_model_is_all_of_its_parts_with_tied_weights_counted_once(before, layers, after, tied):
    work = model(before, layers, after, tied)
    twice = {"parameters": tied, "trained_parameters": min(tied, after.trained_parameters)}
    for name in NAMES:
        total = sum(getattr(part, name) for part in (before, *layers, after))
        assert getattr(work.whole, name) == total - twice.get(name, 0)
    assert work.parameters == work.whole.parameters
    products, scores = work.whole.matmul_flops, work.whole.attention_flops
    assert work.active_parameters * 2 * 16 == pytest.approx(products), "a product and a sum for each weight and token"
    assert work.flops_per_token * 16 == pytest.approx(3 * (products + scores)), "a backward takes two forwards"


def test_what_is_not_said_of_a_layer_is_nothing():
    assert all(getattr(NOTHING, name) == 0 for name in NAMES)
    assert LayerWork(parameters=7) == replace(NOTHING, parameters=7, trained_parameters=7), "all weights are trained"
    plain = model(NOTHING, [NOTHING], NOTHING)
    assert (plain.heads, plain.experts) == (0, 0)


@given(WORKS, WORKS)
def test_plain_values_come_back(one, other):
    work = replace(model(one, [one, other], other, tied=3), heads=8, experts=4)
    assert ModelWork.from_dict(json.loads(json.dumps(work.to_dict()))) == work
    with pytest.raises(TypeError):
        ModelWork.from_dict(work.to_dict() | {"colour": 1})
    with pytest.raises(KeyError):
        ModelWork.from_dict({name: value for name, value in work.to_dict().items() if name != "after"})


def test_bytes_of_a_logit():
    """The loss saves logarithms of probabilities in fp32; its backward takes gradients of them and of the logits."""
    fp32 = 4
    assert fp32 == LOSS_BYTES and 2 * fp32 == LOSS_WORKING_BYTES
    assert {
        2: fp32 + 2,  # a copy in 16 bits
        4: fp32,  # none is needed
    } == CUT_LOSS_WORKING_BYTES


def test_a_loss_in_chunks_keeps_hidden_states_instead_of_logits_and_computes_logits_twice():
    tokens, words, width, chunk = 16, 1000, 10, 8000.0
    head = LayerWork(parameters=words * width, matmul_flops=2.0 * tokens * words * width)
    whole = replace(
        model(NOTHING, [NOTHING], head + loss_work(float(tokens * words), width, trained=True)),
        message_bytes=4.0 * tokens * width,
    )
    chunked = replace(whole, loss_chunk_bytes=chunk)
    alone = Division(microbatch_size=1, tensor=1, context=1)
    assert whole.saved_bytes(whole.after, 0, alone) == 4 * tokens * words
    assert chunked.saved_bytes(whole.after, 0, alone) == 4 * tokens * (width + 1), "the input's gradient, normalisers"
    before, after = (work.working_bytes(work.after, 0, alone, 4) for work in (whole, chunked))
    logits, head_bytes = tokens * words, 4 * words * width
    states = INPUT_STATES * chunked.message_bytes
    assert before == (4 * logits, 8 * logits, 8 * logits, head_bytes, 0)
    assert after == (chunk, chunk + head_bytes, states, chunk + head_bytes, 0)
    assert after.during(Op.B) == after.during(Op.W) == after.weight
    halved = chunked.working_bytes(whole.after, 0, replace(alone, tensor=2), 2)
    gathered = (states + GATHERED_WIDTHS * chunked.message_bytes) / 2
    assert halved == (1.5 * chunk, 1.5 * chunk + words * width, gathered, 1.5 * chunk + words * width, 0), (
        "a copy in 16 bits, half of the gradient"
    )
    assert not chunked.loss_in_chunks(replace(alone, tensor=8)), "all logits of a rank are a chunk"
    products = whole.after.seconds(1.0)
    again = whole.after.seconds(1.0, in_chunks=True)
    once = whole.after.head_flops
    assert [time / once for time in products] == [1, 1, 1] and [time / once for time in again] == [2, 0, 2]
    frozen = loss_work(float(tokens * words), width, trained=False)
    assert chunked.working_bytes(frozen, 0, alone, 4) == (chunk, 0, states, 0, 0) and not frozen.trained_head_flops


def test_an_input_gradient_replaces_activations_layer_by_layer():
    """So with n layers at most one layer's share for weight gradients comes on top, if activations are larger."""
    layer = LayerWork(parameters=0, activation_bytes=40.0, deferred_bytes=30.0, gradient_bytes=16.0)
    loss = loss_work(1.0, 1, trained=True)
    work = model(NOTHING, [layer, layer], loss)
    plain = Division(microbatch_size=1, tensor=1, context=1)
    states = INPUT_STATES * work.message_bytes
    for part in (layer + layer, layer + layer + loss):
        used = work.working_bytes(part, 2, plain, 4)
        assert used.whole == 16.0 and used.input == 30.0 + states
    used = work.working_bytes(layer + layer, 2, replace(plain, recompute=Recompute.layers), 4)
    more = 30.0 - work.message_bytes  # a recomputed layer saves its input only
    assert used.whole == 40.0 + 16.0 and used.input == 30.0 + more + 40.0 + states
