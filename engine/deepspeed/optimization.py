"""Parameter groups and learning-rate schedules for DeepSpeed's optimisers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from weft.conf.schema import LrSchedule, OptimizerConfig


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return trainable parameters in two groups: matrices with weight decay, vectors (norms, biases) without.

    A stage without trainable parameters has one empty group, whose learning rate follows the schedule.
    """
    trainable = [parameter for _, parameter in named if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]] or groups[:1]


def learning_rate(config: OptimizerConfig, total_steps: int) -> Callable[[Optimizer], LambdaLR]:
    """Return a function that creates the learning-rate schedule of an optimiser.

    The rate rises linearly over ``warmup_steps`` or a ``warmup_ratio`` of the steps. Then it decays as configured, to
    ``min_lr_ratio`` of the peak at ``total_steps``.
    """
    shapes: dict[LrSchedule, Callable[[float], float]] = {
        LrSchedule.constant: lambda _: 1.0,
        LrSchedule.linear: lambda done: 1.0 - done * (1.0 - config.min_lr_ratio),
        LrSchedule.cosine: lambda done: (
            config.min_lr_ratio + (1.0 - config.min_lr_ratio) * (1.0 + math.cos(math.pi * done)) / 2
        ),
    }
    shape = shapes[config.schedule]
    warmup = math.ceil(config.warmup_ratio * total_steps) or config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return shape(min(1.0, (step - warmup) / max(1, total_steps - warmup)))

    return lambda optimizer: LambdaLR(optimizer, factor)
