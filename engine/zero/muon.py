"""Muon: momentum that Newton-Schulz iterations orthogonalize, for hidden matrices, and AdamW for other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from inspect import unwrap
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import Tensor

from weft.pipeline.memory import BATCH_ELEMENTS

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
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for batch in _batches(weights) if group["use_muon"] else ():
                self._step_matrices(batch, group)
        if self.aux_optimizer is not None:
            self.aux_optimizer.step()

    def _step_matrices(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape, which are orthogonalized together."""
        beta, gradients, momenta = group["momentum"], [weight.grad for weight in weights], []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momenta.append(state["momentum_buffer"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta)
        updates = torch._foreach_lerp(gradients, momenta, beta)
        update = torch.stack(updates) if len(weights) > 1 else updates[0]
        del updates
        if weights[0].ndim == 4:  # a convolution's filters
            update = update.flatten(-3)
        update = NEWTON_SCHULZ[group["ns_method"]](update, steps=NUM_ITERATIONS)
        update *= original_muon._aspect_ratio_scale(*weights[0].shape[-2:])
        update = update.to(weights[0].dtype).reshape(len(weights), *weights[0].shape)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(update), alpha=-group["lr"])


def _batches(weights: Iterable[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield matrices of one shape and type, as many as have `BATCH_ELEMENTS` elements. A larger one is alone."""
    by_kind: dict[Any, list[Tensor]] = {}
    for weight in weights:
        by_kind.setdefault((weight.shape, weight.dtype), []).append(weight)
    for (shape, _), alike in by_kind.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        for first in range(0, len(alike), size):
            yield alike[first : first + size]
