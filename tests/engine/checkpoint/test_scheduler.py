"""Learning-rate schedules that are restored on ranks with other parameter groups."""

from types import SimpleNamespace

import torch
from torch.optim.lr_scheduler import LambdaLR

from weft.engine.checkpoint.engine_state import _restore_scheduler, _without_groups


def stepped(groups, steps):
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in groups])
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def test_progress_is_the_checkpoints_and_groups_are_the_ranks_own():
    _, before = stepped([1.0], 3)
    optimizer, scheduler = stepped([2.0, 4.0], 0)
    for group in optimizer.param_groups:  # as restored beside the optimiser's state
        group["lr"] = group["initial_lr"] / 8
    _restore_scheduler(
        SimpleNamespace(lr_scheduler=scheduler, optimizer=optimizer), _without_groups(before.state_dict())
    )
    assert scheduler.last_epoch == 3
    assert scheduler.base_lrs == [2.0, 4.0]
    assert scheduler.get_last_lr() == [0.25, 0.5]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.125, 0.25]
