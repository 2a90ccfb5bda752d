"""Muon: momentum that Newton-Schulz iterations orthogonalize, for hidden matrices, and AdamW for other parameters."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import unwrap
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import Tensor

NEWTON_SCHULZ = {
    # Eager: to compile for each shape takes about a minute, during which other ranks wait.
    "gram": unwrap(original_muon.zeropower_via_gram_newtonschulz),
    "standard": unwrap(original_muon.zeropower_via_newtonschulz5),
}
NUM_ITERATIONS = 5


class Muon(MuonWithAuxAdam):
    """DeepSpeed's Muon on whole matrices, of which other replicas may own and step others.

    Clipping scales gradients, as DeepSpeed's does at ZeRO-0. (DeepSpeed's at ZeRO-1 to 3 scales orthogonalized
    updates.) A parameter without a gradient is left alone, as by torch's optimisers.
    """

    def __init__(self, parameter_groups: Iterable[Any], settings: dict[str, Any]) -> None:
        """Divide each group of parameters, which `hidden_matrices.tag` has tagged, into Muon's and Adam's.

        Args:
            settings: the parameters of the optimizer section in a DeepSpeed configuration.
        """
        decoupled = settings.get("adam_w_mode", True)
        empty = {"params": [], "use_muon": False, "lr": settings.get("adam_lr", settings.get("lr", 3e-4))}
        super().__init__(
            DeepSpeedEngine._muon_param_groups(parameter_groups, settings) or [empty],
            adam_optimizer=torch.optim.AdamW if decoupled else torch.optim.Adam,
            adam_w_mode=decoupled,
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"] if group["use_muon"] else ():
                if weight.grad is not None:
                    self._step_matrix(weight, weight.grad, group)
        if self.aux_optimizer is not None:
            self.aux_optimizer.step()

    def _step_matrix(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, beta = self.state[weight], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - beta)
        update = gradient.lerp(momentum, beta)
        if update.ndim == 4:  # a convolution's filters
            update = update.flatten(1)
        update = NEWTON_SCHULZ[group["ns_method"]](update, steps=NUM_ITERATIONS)
        update *= original_muon._aspect_ratio_scale(*weight.shape[-2:])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update.to(weight.dtype).reshape(weight.shape), alpha=-group["lr"])
