"""Stages in one process and on ranks give the logits, losses and gradients of Hugging Face's own run."""

import dataclasses

import pytest
import torch

from tests.engine.stages.parity_cases import VARIANTS, cases
from tests.engine.stages.parity_ranks import through_engine
from weft.engine.stages.checking.comparison import Difference, difference, staged_outcome, whole_outcome


def hugging_face(case):
    return whole_outcome(case.whole(), case.microbatches, case.num_items)


def in_process(case):
    return staged_outcome(case.stages(range(case.num_stages)), case.microbatches, case.num_items)


def off(case, got):
    """Return the largest difference from Hugging Face's own run."""
    want = hugging_face(case)
    assert got.gradients.keys() == want.gradients.keys(), got.gradients.keys() ^ want.gradients.keys()
    return difference(got, want).worst


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("arch", ["gemma3_text", "mixtral"])
def test_all_variants_are_equal(arch, variant):
    (case,) = cases([arch], [variant], [3])
    assert off(case, in_process(case)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_schedules_on_ranks(kind):
    chosen = list(cases(["qwen3", "gpt2", "gemma4_text"], ["tied", "lora"], [2, 4]))
    assert max(off(*pair) for pair in zip(chosen, through_engine(kind, chosen), strict=True)) <= 1e-6


@pytest.mark.parametrize("part", ["logits", "loss", "gradients"])
def test_a_difference_shows(part):
    (case,) = cases(["llama"], ["tied"], [2])
    outcome = in_process(case)
    value = getattr(outcome, part)
    wrong = {n: g + 1e-3 for n, g in value.items()} if part == "gradients" else value + 1e-3
    assert 1e-4 < off(case, dataclasses.replace(outcome, **{part: wrong})) < 0.01


def test_not_a_number_shows():
    assert Difference(float("nan"), 0.0, 0.0, "").worst == float("inf")


def test_adapters_are_awake():
    (case,), (plain,) = cases(["llama"], ["lora"], [2]), cases(["llama"], ["untied"], [2])
    assert not torch.equal(hugging_face(case).logits, hugging_face(plain).logits)
