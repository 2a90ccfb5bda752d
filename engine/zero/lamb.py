"""LAMB: Adam with each parameter's update scaled by the norm of its weights (You et al. 2020, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.engine.zero.norm import squared_norm


class Lamb(Optimizer):
    """LAMB on whole parameters or, after `join`, on fragments of parameters.

    The trust ratio of a parameter is the norm of its weights divided by the norm of its update. It is clamped to
    ``min_coeff`` and ``max_coeff`` as in DeepSpeed. It is 1 if either norm is 0. MegaScale (section 3.1)
    uses LAMB for batches four times as large.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
    ) -> None:
        """Create from parameters or parameter groups; the settings are the groups' defaults."""
        settings = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **settings, "min_coeff": min_coeff, "max_coeff": max_coeff})
        self._places: Mapping[Tensor, int] | None = None

    def join(
        self, places: Mapping[Tensor, int], count: int, add_up: Callable[[Tensor], None], device: torch.device
    ) -> None:
        """Treat the tensors as fragments of parameters from now on.

        Args:
            places: index of the parameter that each fragment is part of.
            count: total number of parameters, equal on all ranks that share them.
            add_up: sums a tensor over these ranks in place. Collective call.
            device: device of the sums.
        """
        self._places, self._count, self._sum, self._device = places, count, add_up, device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient. Collective call after `join`."""
        taken = [(group, *self._directions(group)) for group in self.param_groups]
        if not any(group["lr"] for group, *_ in taken):
            return  # nothing to update
        tensors = [tensor for _, weights, _ in taken for tensor in weights]
        steps = [step for *_, steps in taken for step in steps]
        norms = self._norms(tensors, steps)
        for group, weights, directions in taken:
            for weight, direction in zip(weights, directions, strict=True):
                of_weight, of_step = next(norms)
                ratio = (of_weight / of_step).clamp(group["min_coeff"], group["max_coeff"])
                ratio = torch.where((of_weight > 0) & (of_step > 0), ratio, torch.ones_like(ratio))
                weight.sub_(direction * (group["lr"] * ratio).to(direction.dtype))

    def _directions(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of a group that have a gradient, and Adam's update with weight decay for each."""
        low, high = group["betas"]
        weights = [tensor for tensor in group["params"] if tensor.grad is not None]
        directions = []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state["step"] += 1
            step = float(state["step"])
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(weight.grad, 1 - low)
            square.mul_(high).addcmul_(weight.grad, weight.grad, value=1 - high)
            root = square.sqrt().div_((1 - high**step) ** 0.5).add_(group["eps"])
            direction = (mean / (1 - low**step)).div_(root)
            directions.append(direction.add_(weight, alpha=group["weight_decay"]))
        return weights, directions

    def _norms(self, weights: list[Tensor], directions: list[Tensor]) -> Iterator[Tensor]:
        """Yield, for each tensor, the norms of its whole parameter and of the parameter's update, shape [2]."""
        pairs = zip(weights, directions, strict=True)
        squares = [torch.stack([squared_norm([x], x.device) for x in pair]) for pair in pairs]
        if self._places is not None:
            places = [self._places[weight] for weight in weights]
            shared = torch.zeros(self._count, 2, dtype=torch.float64, device=self._device)
            for place, square in zip(places, squares, strict=True):
                shared[place] += square
            self._sum(shared)
            squares = [shared[place] for place in places]
        yield from (square.sqrt() for square in squares)
