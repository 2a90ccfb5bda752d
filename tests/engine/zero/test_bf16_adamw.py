"""AdamW with bf16 moments follows torch's, whatever the shards, also after a resume."""

import pytest
import torch
from torch import nn

from tests.engine.checkpoint.engines import resume, save_and_go_on
from tests.engine.tiny import reference_losses, tiny_config
from weft.conf.schema import OptimizerState
from weft.engine.zero import Bf16AdamW, Bucket, Collectives
from weft.tools.ranks import run_ranks

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(65, 64), (7,), (0,), (3, 411)]


def gradients_of(steps, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) * 10 ** torch.empty(1).uniform_(-3, 1) for _ in range(steps)]


@pytest.mark.parametrize(("zero_stage", "num_replicas"), [(1, 2), (2, 5), (1, 37)])
def test_shards_step_like_whole_parameters(zero_stage, num_replicas):
    """Weights and moments have the same bits."""
    generator = torch.Generator().manual_seed(0)
    wholes = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    buckets = [
        Bucket(
            [(str(number), nn.Parameter(p.detach().clone())) for number, p in enumerate(wholes)],
            stages=frozenset({0}),
            zero_stage=zero_stage,
            collectives=Collectives(replica=replica, num_replicas=num_replicas),
        )
        for replica in range(num_replicas)
    ]
    alone = Bf16AdamW([{"params": wholes}], **SETTINGS)
    ours = [Bf16AdamW([{"params": [f.tensor for f in bucket.fragments]}], **SETTINGS) for bucket in buckets]
    for gradient in gradients_of(6, 6000):
        for whole in wholes:
            whole.grad = gradient[: whole.numel()].view(whole.shape).clone()
        for bucket, optimizer in zip(buckets, ours, strict=True):
            for fragment in bucket.fragments:
                part = gradient[fragment.start : fragment.start + fragment.tensor.numel()]
                fragment.tensor.grad = part.view(fragment.tensor.shape).clone()
            optimizer.step()
        alone.step()
    for number, whole in enumerate(wholes):
        parts = [(f, o) for b, o in zip(buckets, ours, strict=True) for f in b.fragments if f.name == str(number)]
        parts = [part for part in sorted(parts, key=lambda part: part[0].start) if part[0].tensor.numel()]
        if not whole.numel():
            continue
        assert torch.equal(torch.cat([f.tensor.flatten() for f, _ in parts]), whole.detach().flatten())
        for key in ("exp_avg", "exp_avg_sq"):
            moments = torch.cat([o.state[f.tensor][key].flatten() for f, o in parts])
            assert moments.dtype is torch.bfloat16 and torch.equal(moments, alone.state[whole][key].flatten())


def test_second_moments_decay_like_fp32_ones():
    """After gradients have become smaller. Rounded to nearest, moments would stay where they are."""
    weights = [nn.Parameter(torch.zeros(500)) for _ in range(3)]
    settings = {"lr": 1e-3, "betas": (0.9, 0.999)}
    bf16, fp32 = Bf16AdamW(weights[:1], **settings), torch.optim.AdamW(weights[1:2], **settings)
    nearest = torch.zeros(500)
    generator = torch.Generator().manual_seed(0)
    for step in range(3000):
        gradient = torch.randn(500, generator=generator) * (1.0 if step < 1500 else 0.1)
        for weight, optimizer in zip(weights, (bf16, fp32), strict=False):
            weight.grad = gradient.clone()
            optimizer.step()
        nearest = torch.lerp(nearest, gradient**2, 0.001).bfloat16().float()
    found, expected = bf16.state[weights[0]]["exp_avg_sq"].float(), fp32.state[weights[1]]["exp_avg_sq"]
    assert (found / expected).mean() == pytest.approx(1.0, abs=0.01)
    assert ((found / expected - 1).abs() < 0.1).all()
    assert (nearest / expected).mean() > 1.5
    torch.testing.assert_close(weights[0], weights[1], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_spoils_the_weight(value):
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([value, 1.0])
    Bf16AdamW([weight]).step()
    assert weight.isfinite().tolist() == [False, True]


def config_of(state=OptimizerState.bf16, **keywords):
    config = tiny_config(layers=4, **keywords)
    config.optimizer.state = state
    config.zero.reduce_bucket_size = 10_000
    return config


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_those_of_one_process_and_another_layout_goes_on_alike(tmp_path, monkeypatch):
    """Three steps of two replicas, then of other stages of ZeRO, of the pipeline, of a tensor group, and of fp32."""
    first = config_of(stages=1, zero=2)
    whole = run_ranks(2, save_and_go_on, first, str(tmp_path), 3, 5, 8)[0]["losses"]
    alone = config_of(stages=1, microbatches=8)
    in_fp32 = reference_losses(config_of(OptimizerState.fp32, stages=1, microbatches=8), 1, 8)
    assert whole == pytest.approx(in_fp32, rel=2e-3)
    monkeypatch.setattr(torch.optim, "AdamW", Bf16AdamW)
    assert whole == pytest.approx(reference_losses(alone, 1, 8), rel=1e-6)
    monkeypatch.undo()
    assert whole != pytest.approx(in_fp32, rel=1e-6)
    for world, keywords, tolerance in (
        (2, {"stages": 2, "zero": 1}, 1e-6),
        (1, {"stages": 1, "zero": 3}, 1e-6),
        (2, {"stages": 1, "tensor": 2}, 1e-5),
        (1, {"stages": 1, "state": OptimizerState.fp32}, 2e-3),
    ):
        other = config_of(microbatches=8, **keywords)
        for found in run_ranks(world, resume, other, str(tmp_path), 5, 8):
            assert found["losses"] == pytest.approx(whole[3:], rel=tolerance), keywords
