"""AdamW in fp32, for optimisers that store its moments in fewer bits, on any parts of parameters."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CompactAdamW(Optimizer):
    """AdamW whose subclasses store the moments."""

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

    @abstractmethod
    def _step(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a weight and its state."""


def update(weight: Tensor, gradient: Tensor, moments: Iterable[Tensor], step: int, group: dict[str, Any]) -> None:
    """Update fp32 moments in place, and a weight by them, as torch's AdamW does."""
    (beta1, beta2), rate, (first, second) = group["betas"], float(group["lr"]), moments
    correction1, correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.mul_(1 - rate * group["weight_decay"])
    weight.addcdiv_(first, second.sqrt().div_(correction2).add_(group["eps"]), value=-rate / correction1)
