"""AdamW whose moments have bf16, rounded up or down by step so that errors cancel, on any parts of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_GOLDEN = (math.sqrt(5) - 1) / 2


class Bf16AdamW(Optimizer):
    """torch's AdamW, computed in fp32, with moments that are stored in bf16.

    A second moment that is rounded to nearest never decays, because a step changes it by less than half of a bf16
    number's last digit. So the threshold above which moments are rounded up differs in each step, and takes all values
    equally often. It is the same for all elements: results depend neither on shards nor on a generator.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Create the optimiser."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.numel():
                    self._step(weight, weight.grad, group)

    def _step(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, names = self.state[weight], ("exp_avg", "exp_avg_sq")  # torch's, so that either resumes the other
        if not state:
            state["step"] = 0
            state.update((name, torch.zeros_like(weight, dtype=torch.bfloat16)) for name in names)
        state["step"] += 1
        moments = [state[name].float() for name in names]
        update(weight, gradient, moments, state["step"], group)
        for name, moment in zip(names, moments, strict=True):
            state[name].copy_(_round(moment, state["step"]))


def update(weight: Tensor, gradient: Tensor, moments: Iterable[Tensor], step: int, group: dict[str, Any]) -> None:
    """Update fp32 moments in place, and a weight by them, as torch's AdamW does."""
    (beta1, beta2), rate, (first, second) = group["betas"], float(group["lr"]), moments
    correction1, correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.mul_(1 - rate * group["weight_decay"])
    weight.addcdiv_(first, second.sqrt().div_(correction2).add_(group["eps"]), value=-rate / correction1)


def _round(moment: Tensor, step: int) -> Tensor:
    """Round fp32 numbers to bf16 ones in place. Multiples of the golden ratio spread evenly between 0 and 1."""
    threshold = int(step * _GOLDEN % 1 * 2**16)
    moment.view(torch.int32).add_(threshold).bitwise_and_(-(2**16))
    return moment
