"""The router's auxiliary loss of a mixture of experts, over layers on several stages.

Hugging Face's loss (Switch Transformer, equations 4 to 6) is the product of two means over all layers and tokens of a
micro-batch: how often each expert is chosen, and its probability. Stages accumulate both sums and send them with the
hidden state. The gradient of the sums is sent back with the hidden state's gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.engine.models.batch import Batch, label_tokens
from weft.engine.parallel.axis import Alone, AxisGroup
from weft.engine.parallel.functions import count_once

FIELDS = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
"""Fields of Hugging Face's models that the loss uses."""


def wants_router_loss(config: PreTrainedConfig) -> bool:
    """True if a config enables the router's loss."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


class RouterLoss:
    """One stage's contribution to the router's loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Hook the routers of the stage's layers.

        Raises:
            ValueError: the model does not have the fields of this loss.
        """
        if not all(isinstance(getattr(model, name, None), int | float) for name in FIELDS):
            raise ValueError(
                f"model.overrides.output_router_logits=true: {type(model).__name__} has no auxiliary loss that stages "
                "could add up; set it to false"
            )
        self._num_experts, self._chosen, self._share = (getattr(model, name) for name in FIELDS)
        self.shared_by: AxisGroup = Alone("tensor")
        """Tensor group whose members all have the same routers' outputs."""
        self._noted: list[Tensor] = []
        self._listener: int | None = None
        for router, index in _routers(model):
            router.register_forward_hook(_Note(self, index))

    @property
    def num_sums(self) -> int:
        """Number of elements of the sums that stages exchange."""
        return 2 * self._num_experts + 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which outputs of routers in this thread are recorded. Recomputed layers are not."""
        self._noted, self._listener = [], threading.get_ident()
        try:
            yield
        finally:
            self._listener = None

    def note(self, logits: Tensor) -> None:
        """Record one layer's router logits, [tokens, experts], within `listening`."""
        if self._listener == threading.get_ident():
            self._noted.append(count_once(self.shared_by, logits))

    def sums(self, before: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor:
        """Add this stage's layers to the sums of earlier stages, and clear the recorded outputs.

        Args:
            before: sums of the previous stages, or None on the first stage.
            mask: [B, S], 0 where a token is padding.
            like: a tensor on the device.

        Returns:
            fp32 [2 E + 1]: choices of each expert, probabilities of each expert, and the number of tokens.
        """
        noted, self._noted = self._noted, []
        experts = self._num_experts
        total = torch.zeros(self.num_sums, device=like.device) if before is None else before
        weight = None if mask is None else mask.reshape(-1).float()
        for logits in noted:
            likely = nn.functional.softmax(logits, dim=-1)
            chosen = likely.topk(self._chosen, dim=-1).indices
            each = torch.ones(len(logits), device=like.device) if weight is None else weight
            counts = torch.zeros(experts, device=like.device).scatter_add_(
                0, chosen.reshape(-1), each.repeat_interleave(self._chosen)
            )
            total = total + torch.cat([counts, (likely.float() * each.unsqueeze(-1)).sum(0), each.sum().unsqueeze(0)])
        return total

    def loss(self, sums: Tensor) -> Tensor:
        """Return a micro-batch's loss without its coefficient, from the sums over all layers."""
        chosen, likely, rows = sums.split([self._num_experts, self._num_experts, 1])
        return (chosen / rows * (likely / rows)).sum() * self._num_experts

    def weighted(self, loss: Tensor, batch: Batch, num_items: Tensor | None) -> Tensor:
        """Return a micro-batch's router loss as a part of the step's loss.

        It is multiplied by its coefficient and by the micro-batch's share of the step's label tokens. Without
        ``num_items`` it counts fully. Members of a context group with the same loss each take the share of their own
        labels.
        """
        share = self._share * loss
        return share if num_items is None else share * label_tokens(batch) / num_items


class _Note:
    """Forward hook of a router. It is a class, because stages are copied and pickled."""

    def __init__(self, owner: RouterLoss, index: int) -> None:
        self._owner, self._index = owner, index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._owner.note(output[self._index] if isinstance(output, tuple) else output)


def _routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the modules whose router logits Hugging Face records, each with the index of the logits in its output."""
    found = {}
    for part in model.modules():
        spec = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if not isinstance(part, PreTrainedModel) or spec is None or spec.target_class is None:
            continue
        for name, module in part.named_modules():
            if isinstance(module, spec.target_class) and (
                spec.layer_name is None or f".{spec.layer_name.strip('.')}." in f".{name}."
            ):
                found[module] = spec.index
    return list(found.items())
