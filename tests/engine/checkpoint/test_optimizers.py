"""Collecting from and restoring into any optimiser, sharded by one replica."""

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import nn

from weft.conf.schema import ZeroConfig
from weft.engine.checkpoint import CheckpointError, newest, open_checkpoint, save
from weft.engine.checkpoint.optimizer_state import (
    collect,
    group_scalars,
    loss_scale,
    restore,
    restore_group_scalars,
    restore_loss_scale,
)
from weft.engine.zero import ShardedOptimizer, Sharding

SCALING = {
    "init_scale": 64.0,
    "scale_window": 2,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


class TinyStage(nn.Sequential):
    """A stage of one block, its first bias frozen."""

    index = 0
    tied: frozenset[str] = frozenset()
    cuts = {}

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        self.to(dtype)
        self[0].bias.requires_grad_(False)

    def named_global_parameters(self):
        yield from self.named_parameters()

    def blocks(self):
        return []


class Trained:
    """The stage, its optimiser, and the sharding between them."""

    def __init__(self, make, *, dtype=torch.float32, seed=0, zero=0) -> None:
        self.stage = TinyStage(dtype, seed)
        trainable = [p for p in self.stage.parameters() if p.requires_grad]
        self.base = make([{"params": [p for p in trainable if p.ndim == d], "lr": 0.1 / d} for d in (1, 2)])
        self.sharding = Sharding([self.stage], ZeroConfig(stage=zero))
        self.optimizer = ShardedOptimizer(
            self.base,
            self.sharding,
            loss_scaler=CreateLossScaler(dtype, 0, True, SCALING),
            clip=lambda: 0.0,
            check_overflow=dtype is torch.float16,
        )

    @property
    def held(self):
        return list(self.sharding.fragments())

    def step(self) -> float:
        loss = self.stage(torch.ones(2, 7, dtype=self.stage[0].weight.dtype)).float().square().sum()
        (loss * self.optimizer.cur_scale).backward()
        for bucket in self.sharding.trained:
            bucket.reduce()
        self.optimizer.step()
        return loss.item()


KINDS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1),
    "plain sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
    "nadam": torch.optim.NAdam,
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
}


def round_trip(folder, make, **settings):
    """Losses of an optimiser that goes on, and of one that was restored after 3 steps."""
    first = Trained(make, **settings)
    for _ in range(3):
        first.step()
    meta = {"groups": group_scalars(first.held, first.base), "scale": loss_scale(first.optimizer)}
    save(folder, 3, collect(first.held, first.base, [], lambda axis: (0, 1)), meta)
    expected = [first.step() for _ in range(4)]

    other = Trained(make, seed=1, **settings)
    other.base.param_groups[0]["lr"] = 77.0
    checkpoint = open_checkpoint(newest(folder))
    restore(other.held, other.base, checkpoint)
    restore_group_scalars(other.held, other.base, checkpoint.meta["groups"])
    restore_loss_scale(other.optimizer, checkpoint.meta["scale"])
    other.sharding.publish()
    return expected, [other.step() for _ in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizer(tmp_path, kind):
    expected, found = round_trip(tmp_path, KINDS[kind])
    assert found == expected
    assert len(set(found)) == 4


@pytest.mark.parametrize("zero", [0, 2])
def test_fp16(tmp_path, zero):
    """The loss scale doubles every other step, and goes on doubling."""
    expected, found = round_trip(tmp_path, torch.optim.AdamW, dtype=torch.float16, zero=zero)
    assert found == expected
    checkpoint = open_checkpoint(newest(tmp_path))
    assert checkpoint.meta["scale"]["cur_scale"] > SCALING["init_scale"]
    assert "optim/exp_avg/0.weight" in checkpoint.names
    assert "weight/0.bias" in checkpoint.names
    assert "optim/exp_avg/0.bias" not in checkpoint.names


def test_another_optimizer_is_refused(tmp_path):
    first = Trained(torch.optim.AdamW)
    first.step()
    save(tmp_path, 1, collect(first.held, first.base, [], lambda axis: (0, 1)), {})
    other = Trained(lambda groups: torch.optim.SGD(groups, momentum=0.9))
    with pytest.raises(CheckpointError, match=r"'(exp_avg|exp_avg_sq|step)'.*SGD.*optimizer\.kind"):
        restore(other.held, other.base, open_checkpoint(newest(tmp_path)))


@pytest.mark.parametrize(("wider", "message"), [((7, 6, 3), r"0\.weight has shape \(5, 7\), the model's has \(6, 7\)")])
def test_weights_of_another_shape_are_refused(tmp_path, monkeypatch, wider, message):
    first = Trained(torch.optim.AdamW)
    first.step()
    save(tmp_path, 1, collect(first.held, first.base, [], lambda axis: (0, 1)), {})
    before, inner, after = wider
    made = iter([nn.Linear(before, inner), nn.Linear(inner, after)])
    with monkeypatch.context() as patch:
        patch.setattr(nn, "Linear", lambda *_: next(made))
        other = Trained(torch.optim.AdamW)
    with pytest.raises(CheckpointError, match=message):
        restore(other.held, other.base, open_checkpoint(newest(tmp_path)))


def test_before_the_first_step(tmp_path):
    """A checkpoint without optimiser state makes an optimiser that trained forget its own."""
    trained = Trained(torch.optim.AdamW)
    save(tmp_path, 0, collect(trained.held, trained.base, [], lambda axis: (0, 1)), {})
    expected = [trained.step() for _ in range(3)]
    restore(trained.held, trained.base, open_checkpoint(newest(tmp_path)))
    trained.sharding.publish()
    assert [trained.step() for _ in range(3)] == expected
