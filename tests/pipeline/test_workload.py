"""Tests of a model's work: sums of its parts, operations per token, and plain values that come back."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.pipeline.workload import (
    CUT_LOSS_WORKING_BYTES,
    LOSS_BYTES,
    LOSS_WORKING_BYTES,
    NOTHING,
    LayerWork,
    ModelWork,
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
