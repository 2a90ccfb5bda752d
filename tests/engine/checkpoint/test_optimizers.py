"""Collecting from and restoring into any optimiser, sharded by one replica."""

from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import nn

from tests.engine.zero.replicas import whole_step
from weft.conf.schema import ZeroConfig
from weft.engine.checkpoint import CheckpointError, newest, open_checkpoint, save
from weft.engine.checkpoint.optimizer_state import (
    collect,
    group_scalars,
    loss_scale,
    restore,
    restore_loss_scale,
    restore_step_counts,
)
from weft.engine.checkpoint.rates import restore_rates
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
        whole_step(self.optimizer)
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
    restore_step_counts(other.held, other.base, checkpoint.meta["groups"])
    restore_rates(other.held, other.base, None, checkpoint.meta["groups"], {}, 4)
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


def saved(folder, trained, leave=()):
    pieces = collect(trained.held, trained.base, [], lambda axis: (0, 1))
    save(folder, 1, [piece for piece in pieces if piece.name not in leave], {})
    return open_checkpoint(newest(folder))


def test_a_weight_that_is_not_there_is_named(tmp_path):
    trained = Trained(torch.optim.AdamW)
    with pytest.raises(CheckpointError, match=r"it lacks the model's 2\.bias; give the model and lora settings"):
        restore(trained.held, trained.base, saved(tmp_path, trained, leave=["weight/2.bias"]))


def test_what_had_not_been_stepped_when_it_was_saved_is_as_new(tmp_path):
    first, other = Trained(torch.optim.AdamW), Trained(torch.optim.AdamW, seed=1)
    first.step()
    other.step()
    bias = next(fragment for fragment in first.held if fragment.name == "2.bias")
    del first.base.state[bias.tensor]
    restore(other.held, other.base, saved(tmp_path, first))
    of_name = {fragment.name: fragment.tensor for fragment in other.held}
    assert of_name["2.bias"] not in other.base.state
    assert set(other.base.state[of_name["2.weight"]]) == {"step", "exp_avg", "exp_avg_sq"}
    first.base.state[bias.tensor] = {}


class Counting(torch.optim.SGD):
    """Its state has numbers that are no tensors, and a vector of another shape than the weights."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["mean"] = state.get("mean", 0.0) + 0.5
                state["last"] = torch.full((4,), float(state["calls"]))
        super().step()


@pytest.mark.parametrize("zero", [0, 1])
def test_numbers_keep_their_types_and_vectors_of_another_shape_are_whole(tmp_path, zero):
    first, other = Trained(Counting, zero=zero), Trained(Counting, seed=1, zero=zero)
    for _ in range(3):
        first.step()
    restore(other.held, other.base, saved(tmp_path, first))
    for fragment in other.held:
        if fragment.trained:
            state = other.base.state[fragment.tensor]
            assert (state["calls"], state["mean"], state["last"].tolist()) == (3, 1.5, [3.0] * 4)
            assert [type(state[key]) for key in ("calls", "mean")] == [int, float]


def test_a_vector_that_belongs_to_no_part_of_a_parameter_is_refused():
    trained = Trained(Counting)
    trained.step()
    fragment = next(fragment for fragment in trained.held if fragment.name == "2.weight")
    part = replace(fragment, tensor=fragment.tensor.flatten()[:4].clone())
    trained.base.state[part.tensor] = {"last": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"optim/last/2\.weight: shape \(3,\).*optimizer\.kind.*zero\.stage=0"):
        collect([part], trained.base, [], lambda axis: (0, 1))
    trained.base.state[part.tensor] = {"last": torch.ones(1), "step": torch.tensor(5.0)}
    names = [piece.name for piece in collect([part], trained.base, [], lambda axis: (0, 1))]
    assert names == ["weight/2.weight", "optim/last/2.weight", "optim/step/2.weight"]
    later = replace(part, start=4)
    assert [piece.name for piece in collect([later], trained.base, [], lambda axis: (0, 1))] == ["weight/2.weight"]


def test_what_is_made_to_be_restored_changes_nothing_else(tmp_path):
    """Neither weights nor learning rates, which may be tensors, nor gradients, nor the state of those that have one."""
    first = Trained(torch.optim.AdamW)
    first.step()
    checkpoint = saved(tmp_path, first)
    made = Trained(lambda groups: torch.optim.AdamW(groups, foreach=False))
    made.base.param_groups[0]["lr"] = torch.tensor(0.25)
    tensors = [tensor for group in made.base.param_groups for tensor in group["params"]]
    for number, tensor in enumerate(tensors):
        tensor.grad = torch.full_like(tensor, float(number))
    restore(made.held, made.base, checkpoint)
    assert [float(group["lr"]) for group in made.base.param_groups] == [0.25, 0.05]
    for number, tensor in enumerate(tensors):
        assert bool((tensor.grad == number).all())
    for mine, other in zip(made.held, first.held, strict=True):
        assert torch.equal(mine.tensor, other.tensor)
        if mine.trained:
            for key, value in first.base.state[other.tensor].items():
                assert torch.equal(made.base.state[mine.tensor][key], value)


def test_step_counts_and_rates_of_groups_keep_their_type():
    made = Trained(torch.optim.AdamW)
    for group, given in zip(made.base.param_groups, (0.5, torch.tensor(0.5)), strict=True):
        group["lr"], group["step"] = given, 2
    of_all = {f.name: {"lr": 0.125, "step": 7.0} for f in made.held}
    restore_step_counts(made.held, made.base, of_all)
    assert [(float(group["lr"]), group["step"]) for group in made.base.param_groups] == [(0.5, 7)] * 2
    restore_rates(made.held, made.base, None, of_all, {}, 7)
    for group, kind in zip(made.base.param_groups, (float, torch.Tensor), strict=True):
        assert (float(group["lr"]), group["step"]) == (0.125, 7)
        assert isinstance(group["lr"], kind) and isinstance(group["step"], int)
    assert group_scalars(made.held, made.base) == {f.name: {"lr": 0.125, "step": 7} for f in made.held if f.trained}
