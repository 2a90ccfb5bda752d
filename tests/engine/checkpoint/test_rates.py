"""Learning rates on resume are what an uninterrupted run with the new settings would have."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR
from torch.optim import lr_scheduler as torch_schedules

from weft.conf.schema import LrSchedule, OptimizerConfig
from weft.engine.checkpoint.optimizer_state import group_scalars
from weft.engine.checkpoint.rates import PER_GROUP, restore_rates
from weft.engine.deepspeed.construction import learning_rate

SETTINGS = {
    "lr": lambda lr: ([lr], learning_rate(OptimizerConfig(schedule=LrSchedule.constant), 100)),
    "schedule": lambda kind: ([1.0], learning_rate(OptimizerConfig(schedule=LrSchedule(kind)), 100)),
    "warm-up": lambda steps: ([1.0], learning_rate(OptimizerConfig(warmup_steps=steps), 100)),
    "steps": lambda steps: ([1.0], learning_rate(OptimizerConfig(), steps)),
    "two groups": lambda lr: ([lr, 0.5], lambda stepped: torch_schedules.ExponentialLR(stepped, 0.9)),
    "gamma": lambda gamma: ([1.0], lambda stepped: torch_schedules.StepLR(stepped, 2, gamma)),
    "milestones": lambda steps: ([1.0], lambda stepped: torch_schedules.MultiStepLR(stepped, [2, steps], 0.5)),
    "annealing": lambda steps: ([1.0], lambda stepped: torch_schedules.CosineAnnealingLR(stepped, steps)),
    "restarts": lambda steps: ([1.0], lambda stepped: torch_schedules.CosineAnnealingWarmRestarts(stepped, steps)),
    "one cycle": lambda lr: ([1.0], lambda stepped: torch_schedules.OneCycleLR(stepped, lr, 100, cycle_momentum=False)),
    "in sequence": lambda steps: ([1.0], lambda stepped: in_sequence(stepped, steps)),
    "DeepSpeed's": lambda lr: ([1.0], lambda stepped: WarmupDecayLR(stepped, 100, 0.0, lr, 10)),
    "DeepSpeed's cosine": lambda steps: ([1.0], lambda stepped: WarmupCosineLR(stepped, steps, warmup_num_steps=3)),
    "none": lambda lr: ([lr], lambda stepped: None),
}
VALUES = {
    "lr": (1e-3, 1e-5),
    "schedule": ("constant", "linear"),
    "gamma": (0.5, 0.1),
    "two groups": (1.0, 0.25),
    "one cycle": (1.0, 3.0),
    "DeepSpeed's": (1.0, 0.1),
    "none": (1e-3, 1e-5),
}


def made(setting, value):
    rates, schedule = SETTINGS[setting](value)
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer, schedule(optimizer)


def in_sequence(optimizer, steps):
    first, then = torch_schedules.ConstantLR(optimizer, 0.1, steps), torch_schedules.ExponentialLR(optimizer, 0.9)
    return torch_schedules.SequentialLR(optimizer, [first, then], [steps])


def stepped(run, steps):
    optimizer, scheduler = run
    rates = []
    for _ in range(steps):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def fragments(optimizer):
    tensors = [group["params"][0] for group in optimizer.param_groups]
    return [SimpleNamespace(name=str(number), tensor=tensor, trained=True) for number, tensor in enumerate(tensors)]


def resumed(run, before, steps):
    """Restore into ``run`` what a checkpoint of ``before`` has."""
    optimizer, scheduler = before
    groups = group_scalars(fragments(optimizer), optimizer)
    state = {} if scheduler is None else scheduler.state_dict()
    saved = {key: value for key, value in state.items() if key not in PER_GROUP}
    restore_rates(fragments(run[0]), *run, groups, saved, steps)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("is_changed", [False, True])
def test_resume_uses_changed_settings_from_the_first_step(setting, is_changed):
    old, new = VALUES.get(setting, (10, 20))
    value = new if is_changed else old
    before, whole, again = made(setting, old), made(setting, value), made(setting, value)
    stepped(before, 7)
    expected = [stepped(whole, 7)[-1], *stepped(whole, 5)]
    resumed(again, before, 7)
    assert [[group["lr"] for group in again[0].param_groups], *stepped(again, 5)] == expected


def test_rates_that_depend_on_metrics_are_restored_and_scaled():
    def plateau(lr):
        optimizer, _ = made("none", lr)
        return optimizer, torch_schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    before = plateau(1.0)
    for loss in (1.0, 2.0):
        before[1].step(loss)
    assert before[0].param_groups[0]["lr"] == 0.5
    same, other = plateau(1.0), plateau(0.25)
    for run, rate in ((same, 0.5), (other, 0.125)):
        resumed(run, before, 2)
        assert run[0].param_groups[0]["lr"] == rate
        assert run[1].best == 1.0


def test_rates_set_by_hand_are_restored():
    before, again = made("none", 1.0), made("none", 1.0)
    before[0].param_groups[0]["lr"] = 0.3
    resumed(again, before, 2)
    assert again[0].param_groups[0]["lr"] == 0.3
