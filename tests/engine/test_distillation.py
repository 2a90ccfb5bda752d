"""Distillation has DeepSpeed's losses and gradients, and pipelines those of a plain loop."""

from math import inf

import pytest
import torch
from deepspeed.runtime.rollout.opsd import generalized_jsd_loss
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.engine.distilled import distilled, reference_losses, save_teacher, weft_losses
from tests.engine.tiny import tiny_config
from weft.conf.schema import DistillConfig
from weft.engine.models.distillation import TopTokens, distillation_losses, top_tokens
from weft.engine.planning.gathering import facts_before_start
from weft.engine.planning.run_plan import plan_run
from weft.engine.stages.files.loading import load_hf_config
from weft.engine.stages.teacher import Teacher
from weft.tools.ranks import run_ranks


def tokens(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 9, 40, generator=generator) * 4 for _ in range(2))
    labels = torch.randint(40, (2, 9), generator=generator)
    labels[:, 3:5] = -100
    return student.to(dtype).requires_grad_(), teacher.to(dtype), labels


def loss(student, teacher, labels, chunk_bytes=inf, **settings):
    settings = DistillConfig(enabled=True, **settings)
    best = top_tokens(teacher.flatten(0, 1), settings.top_k)
    rows = student.flatten(0, 1), labels.flatten()
    return distillation_losses(*rows, best, settings, chunk_bytes=chunk_bytes).sum()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("top_k", "chunk_bytes"), [(0, inf), (6, inf), (40, inf), (6, 5 * 160), (0, 1)])
def test_divergence_and_its_gradient_are_deepspeeds(temperature, top_k, chunk_bytes):
    student, teacher, labels = tokens()
    settings = {"temperature": temperature, "top_k": top_k, "tail": False, "chunk_bytes": chunk_bytes}
    got = loss(student, teacher, labels, weight=1.0, **settings)
    (gradient,) = torch.autograd.grad(got, student)
    want = generalized_jsd_loss(
        student, teacher, labels != -100, beta=0.0, temperature=temperature, teacher_top_k=top_k or None
    ).loss_sum
    (expected,) = torch.autograd.grad(want, student)
    torch.testing.assert_close(got, want * temperature**2)
    torch.testing.assert_close(gradient, expected * temperature**2)


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 6}, {"top_k": 6, "tail": False}])
def test_without_weight_the_loss_is_the_cross_entropy(settings):
    student, teacher, labels = tokens()
    got, want = (
        loss(student, teacher, labels, weight=0.0, **settings),
        cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="sum"),
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, student)[0] for each in (got, want)))


def test_the_tail_approaches_the_whole_divergence_from_below():
    student, teacher, labels = tokens()
    found = [float(loss(student, teacher, labels, weight=1.0, top_k=k).detach()) for k in (1, 5, 20, 39, 0)]
    assert found == sorted(found) and found[-2] == pytest.approx(found[-1], rel=1e-3)


def test_a_student_like_its_teacher_has_no_divergence():
    student, _, labels = tokens()
    for settings in ({"top_k": 0}, {"top_k": 3}, {"top_k": 3, "tail": False}, {"top_k": 3, "temperature": 0.3}):
        got = loss(student, student.detach(), labels, weight=1.0, **settings)
        assert abs(float(got.detach())) < 1e-4
        assert torch.autograd.grad(got, student)[0].abs().max() < 1e-4


def test_ignored_tokens_and_impossible_ones_give_no_nan():
    student, teacher, labels = tokens()
    teacher[:, 3:5] = torch.nan  # ignored
    teacher[:, 6, 10:] = -torch.inf
    teacher[:, 7, 5] = 1e30  # certain
    for top_k in (0, 12):
        got = loss(student, teacher, labels, top_k=top_k)
        (gradient,) = torch.autograd.grad(got, student)
        assert got.isfinite() and gradient.isfinite().all() and not gradient[:, 3:5].any()


def test_a_backward_needs_one_number_per_logit_in_their_type():
    student, teacher, labels = tokens(torch.bfloat16)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        got = loss(student, teacher, labels)
    assert sum(tensor.nbytes for tensor in saved.values() if tensor.numel() >= student.numel()) == 2 * student.numel()
    (gradient,) = torch.autograd.grad(3 * got, student)
    (exact,) = torch.autograd.grad(3 * loss(student.float(), teacher.float(), labels), student)
    torch.testing.assert_close(gradient, exact, rtol=2**-7, atol=1e-3)


def test_a_teacher_that_is_not_finite_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_teacher(tmp_path))
    model.model.norm.weight.data[3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"distill\.teacher=.*model\.norm\.weight has NaN or infinity in fp32; copy"):
        Teacher(distilled(tiny_config(), teacher=str(tmp_path)), 64).load(torch.device("cpu"))


def test_teachers_values_do_not_depend_on_their_type():
    """Sums over a vocabulary are in fp32, whatever the model computes in."""
    _, teacher, _ = tokens(torch.bfloat16)
    low, high = top_tokens(teacher.flatten(0, 1), 6), top_tokens(teacher.float().flatten(0, 1), 6)
    assert low.log_probabilities.dtype is torch.float32
    assert torch.equal(low.log_probabilities, high.log_probabilities)


def test_a_teacher_in_chunks_scores_as_a_whole(tmp_path):
    data = {"input_ids": torch.randint(64, (3, 12)), "position_ids": torch.arange(12).repeat(3, 1)}
    found = list[TopTokens]()
    for chunk_mb in (128.0, 1e-3):
        config = distilled(tiny_config(), teacher=save_teacher(tmp_path), top_k=5)
        config.model.loss_chunk_mb = chunk_mb
        teacher = Teacher(config, 64)
        teacher.load(torch.device("cpu"))
        found.append(teacher.scores(data))
    whole, parts = found
    assert torch.equal(whole.ids, parts.ids) and int(whole.ids.max()) < 64
    torch.testing.assert_close(whole.log_probabilities, parts.log_probabilities)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_steps_equal_those_of_a_plain_loop(tmp_path):
    teacher = save_teacher(tmp_path)
    cases = [
        distilled(tiny_config(), teacher=teacher, top_k=8, temperature=2.0),
        distilled(tiny_config(stages=1, zero=1), teacher=teacher, top_k=0),
        distilled(tiny_config(stages=1, tensor=2), teacher=teacher, top_k=8, tail=False, weight=1.0),
    ]
    cases[0].model.loss_chunk_mb = 1e-3
    found = run_ranks(2, weft_losses, cases, timeout_s=380)[0]
    for config, losses in zip(cases, found, strict=True):
        replicas = 2 // config.pipeline.stages // config.parallel.context // config.parallel.tensor
        assert losses == pytest.approx(reference_losses(config, replicas), abs=1e-4), config.distill


def test_plans_count_the_teacher_on_the_ranks_with_the_last_stage(tmp_path):
    plain = tiny_config(layers=4)
    plain.cluster.ranks = 2
    plain.data.cache_dir = str(tmp_path / "cache")
    config = distilled(plain, teacher=save_teacher(tmp_path))
    before, after = (plan_run(c, facts_before_start(c, load_hf_config(c.model))) for c in (plain, config))
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path).parameters())
    more = [new.zero.weights - old.zero.weights for old, new in zip(before.memory, after.memory, strict=True)]
    assert more == [0, 4 * weights]
    assert after.costs.stages[1].forward_s > 1.5 * before.costs.stages[1].forward_s
    assert after.costs.stages[0] == before.costs.stages[0] and not after.facts.model.chunks_loss

    config.inference.scores.enabled = True
    ahead = plan_run(config, facts_before_start(config, load_hf_config(config.model)))
    tokens = config.pipeline.microbatches * config.train.microbatch_size * config.data.sequence_length
    more = [new.zero.weights - old.zero.weights for old, new in zip(before.memory, ahead.memory, strict=True)]
    assert more == [0, 8 * tokens * config.distill.top_k], "ids and logarithms of all tokens of a step"
    assert [cost.forward_s for cost in ahead.costs.stages] == [cost.forward_s for cost in before.costs.stages]
