"""Learning rates on resume: this run's settings, evaluated at the checkpoint's step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from weft.engine.checkpoint.optimizer_state import set_scalar
from weft.engine.zero import Fragment

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
"""Entries of a torch scheduler's state that hold one value per parameter group of this rank."""


def restore_rates(
    held: Iterable[Fragment],
    optimizer: Optimizer,
    scheduler: Any,
    groups: Mapping[str, Mapping[str, float]],
    saved: Mapping[str, Any],
    steps: int,
) -> None:
    """Move a schedule to a checkpoint's step, and set the learning rates of that step.

    A schedule of torch or DeepSpeed that depends only on the step is evaluated again, so changed settings apply from
    the first step. Otherwise the checkpoint's rates are used, scaled by the change of the initial rate.

    Args:
        held: this rank's parameters.
        scheduler: the learning-rate schedule of the optimiser, or None.
        groups: learning rate and initial learning rate of each parameter, as saved.
        saved: the schedule's saved state without entries per parameter group, or empty if there was no schedule.
        steps: number of steps that changed weights.
    """
    done = saved["last_epoch"] if "last_epoch" in saved else saved.get("last_batch_iteration", steps - 1) + 1
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch, scheduler._step_count = done, done + 1
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        _set_rates(optimizer, [base * factor(done) for base, factor in pairs])
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
    elif _is_fresh(scheduler):
        with warnings.catch_warnings():  # suppresses a warning about missing optimiser steps
            warnings.simplefilter("ignore")
            for _ in range(done):
                scheduler.step()
    else:
        _set_rates(optimizer, [_rate(group, held, groups) for group in optimizer.param_groups])
        if scheduler is not None:
            own = {key: value for key, value in scheduler.state_dict().items() if key in PER_GROUP}
            if "_last_lr" in own:
                own["_last_lr"] = [group["lr"] for group in optimizer.param_groups]
            scheduler.load_state_dict({**saved, **own})


def _is_fresh(scheduler: Any) -> bool:
    """True if a schedule has made no step yet, and its steps take no metric."""
    if not hasattr(scheduler, "step") or _needs_arguments(scheduler.step):
        return False
    if isinstance(scheduler, LRScheduler):
        return scheduler.last_epoch == 0
    return getattr(scheduler, "last_batch_iteration", None) == -1


def _needs_arguments(function: Any) -> bool:
    return any(parameter.default is parameter.empty for parameter in inspect.signature(function).parameters.values())


def _rate(group: Mapping[str, Any], held: Iterable[Fragment], groups: Mapping[str, Mapping[str, float]]) -> float:
    """Return the saved rate of a group's parameters, scaled to the group's initial rate.

    If no rate was saved for them, this is the group's own rate.
    """
    saved = {id(fragment.tensor): groups[fragment.name] for fragment in held if fragment.name in groups}
    values = next((saved[id(tensor)] for tensor in group["params"] if id(tensor) in saved), {})
    rate, initial = values.get("lr", float(group["lr"])), values.get("initial_lr")
    own = float(group.get("initial_lr", group["lr"]))
    if initial is None or initial == own:
        return rate
    return own if rate == initial or not initial else rate * own / initial


def _set_rates(optimizer: Optimizer, rates: Iterable[float | Tensor]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_scalar(group, "lr", float(rate))
