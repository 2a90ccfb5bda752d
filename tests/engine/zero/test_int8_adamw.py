"""AdamW with 8-bit moments equals bitsandbytes' in one process, whatever the shards, also after a resume."""

import pytest
import torch
from torch import nn

from tests.engine.checkpoint.engines import resume, save_and_go_on
from tests.engine.tiny import reference_losses, tiny_config
from tests.engine.zero import test_norm
from tests.engine.zero.replicas import SmallStage
from tests.engine.zero.small_blocks import LEAST, losses_with_bitsandbytes, with_small_blocks
from weft.conf.schema import OptimizerState
from weft.engine.zero import Bucket, Collectives, NonFiniteError, Skips, int8_adamw
from weft.engine.zero.int8_adamw import Int8AdamW
from weft.tools.ranks import run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes")
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(65, 64), (7,), (4096,), (4095,), (0,), (3, 4111), (4097,)]
"""Shapes of which the first has blocks, and some have a part of one at their end, or none."""


def sharded(parameters, zero_stage, replica, num_replicas):
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    int8_adamw.tag(named)
    collectives = Collectives(replica=replica, num_replicas=num_replicas)
    return Bucket(named, stages=frozenset({0}), zero_stage=zero_stage, collectives=collectives)


@pytest.mark.parametrize(("zero_stage", "num_replicas"), [(0, 1), (1, 1), (1, 2), (2, 5), (1, 37)])
def test_shards_step_as_bitsandbytes_steps_whole_parameters(zero_stage, num_replicas):
    """Weights, codes and scales have the same bits. Parameters with few elements have fp32 moments."""
    generator = torch.Generator().manual_seed(0)
    wholes = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    buckets = [
        sharded([nn.Parameter(p.detach().clone()) for p in wholes], zero_stage, replica, num_replicas)
        for replica in range(num_replicas)
    ]
    large = [p for p in wholes if p.numel() >= 4096]
    small = [p for p in wholes if p.numel() < 4096]
    theirs = bitsandbytes.optim.AdamW8bit(large, **SETTINGS)
    plain = torch.optim.AdamW(small, **SETTINGS)
    ours = [Int8AdamW([{"params": [f.tensor for f in bucket.fragments]}], **SETTINGS) for bucket in buckets]
    for _ in range(6):
        for parameter in wholes:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10 ** torch.empty(1).uniform_(-4, 1)
        for bucket, optimizer in zip(buckets, ours, strict=True):
            for fragment in bucket.fragments:
                flat = wholes[int(fragment.name)].grad.flatten()
                part = flat[fragment.start : fragment.start + fragment.tensor.numel()]
                fragment.tensor.grad = part.view(fragment.tensor.shape).clone()
            optimizer.step()
        theirs.step()
        plain.step()
    for number, whole in enumerate(wholes):
        parts = [(f, o) for b, o in zip(buckets, ours, strict=True) for f in b.fragments if f.name == str(number)]
        parts.sort(key=lambda part: part[0].start)
        weights = torch.cat([f.tensor.flatten() for f, _ in parts]).view(whole.shape)
        if whole.numel() < 4096:
            torch.testing.assert_close(weights, whole.detach(), rtol=1e-5, atol=1e-6)
            assert all("absmax1" not in o.state[f.tensor] for f, o in parts)
            continue
        assert torch.equal(weights, whole.detach())
        for key in ("state1", "state2", "absmax1", "absmax2"):
            found = torch.cat([o.state[f.tensor][key].flatten() for f, o in parts])
            assert torch.equal(found, theirs.state[whole][key].flatten()), key
        assert all(f.start % 256 == 0 for f, _ in parts)


def held_by(trained):
    states = trained.optimizer.state.values()
    tensors = [*trained.weights(), *(x for state in states for x in state.values() if isinstance(x, torch.Tensor))]
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_is_skipped_or_named_as_with_fp32_moments(value, monkeypatch):
    def tagged_stage(**keywords):
        stage = SmallStage(**keywords)
        int8_adamw.tag(stage.named_parameters())
        return stage

    monkeypatch.setattr(int8_adamw, "has_int8_state", lambda count: count >= 16)
    monkeypatch.setattr(test_norm, "SmallStage", tagged_stage)
    skipping = test_norm.Trained(make=Int8AdamW, skips=Skips(3))
    skipping.step()
    before = held_by(skipping)
    skipping.step(spoilt=value)
    assert skipping.optimizer.overflow and any(tensor.dtype is torch.uint8 for tensor in before)
    assert all(map(torch.equal, held_by(skipping), before))
    messages = []
    for kind in (Int8AdamW, torch.optim.AdamW):
        trained = test_norm.Trained(make=kind)
        trained.step()
        trained.step(spoilt=value)
        with pytest.raises(NonFiniteError) as raised:
            trained.optimizer.check_finite()
        with pytest.raises(NonFiniteError, match="no longer finite"):
            trained.optimizer.restored([])  # drops the norm, so that weights and moments are looked at
            trained.optimizer.check_finite()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def config_of(**keywords):
    config = tiny_config(layers=4, **keywords)
    config.optimizer.state = OptimizerState.int8
    config.zero.reduce_bucket_size = 10_000
    return config


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_bitsandbytes_and_another_layout_goes_on_alike(tmp_path, monkeypatch):
    """Three steps of two replicas, then of other stages of ZeRO and of the pipeline, and of one process."""
    first = config_of(stages=1, zero=2)
    whole = run_ranks(2, with_small_blocks, save_and_go_on, first, str(tmp_path), 3, 5, 8)[0]["losses"]

    def make(groups, **settings):
        return bitsandbytes.optim.AdamW8bit(groups, **settings, min_8bit_size=LEAST)

    monkeypatch.setattr(torch.optim, "AdamW", make)
    alone = config_of(stages=1, microbatches=8)
    assert whole == pytest.approx(reference_losses(alone, 1, 8), rel=1e-4)
    monkeypatch.undo()
    assert whole != pytest.approx(reference_losses(config_of(stages=1, microbatches=8), 1, 7), rel=1e-4)
    layouts = [(2, {"stages": 2, "zero": 1}), (1, {"stages": 1, "zero": 3}), (1, {"stages": 1})]
    for world, keywords in layouts:
        other = config_of(microbatches=8, **keywords)
        for found in run_ranks(world, with_small_blocks, resume, other, str(tmp_path), 5, 8):
            assert found["losses"] == pytest.approx(whole[3:], rel=1e-5), keywords


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_optimizer_of_bitsandbytes_is_refused_if_shards_cut_its_blocks():
    """Before the first step, because the first checkpoint could not store them. Shards that cut none train."""
    sharded, whole = tiny_config(stages=1, zero=1, layers=1), tiny_config(stages=1, zero=1)
    for found in run_ranks(2, losses_with_bitsandbytes, sharded, LEAST):
        assert "AdamW8bit of bitsandbytes: ZeRO's shards cut model." in found and "optimizer.state=int8" in found
    twice = config_of(stages=1)
    for found in run_ranks(2, losses_with_bitsandbytes, twice, LEAST):
        assert found.startswith("optimizer.state=int8: `initialize` was given an optimizer")
    first, second = run_ranks(2, losses_with_bitsandbytes, whole, LEAST)
    assert isinstance(first, list) and first == second
