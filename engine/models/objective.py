"""The objective: a loss that the last stage minimises instead of the model's own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.models.batch import Batch, count_label_tokens

_ITEMS = "_weft_items"
Forward = Callable[..., Any]
"""The last stage's forward on the current micro-batch. A loss must call it once.

It takes further arguments of the model, such as ``labels``. It returns the output of the model's own forward, with
``logits`` [B, S, V].
"""


@dataclass(frozen=True)
class Objective:
    """A custom loss. It runs only on the last stage's ranks, so it must not wait for other ranks.

    Attributes:
        loss: ``(forward, batch, num_items) -> scalar``. It returns the *sum* over this micro-batch's items, divided by
            ``num_items``. ``num_items`` is the number of items of the whole step, over all micro-batches and replicas
            (a scalar tensor). Losses and gradients are then added up, never averaged, and equal those of one process
            for any split. ``batch`` has every tensor that the loader yielded, on the device. Labels are not shifted.
        items: returns the number of items of a micro-batch as the loader yielded it. In host memory this needs no
            synchronisation. The loss of a micro-batch without items counts as 0.
    """

    loss: Callable[[Forward, Batch, Tensor], Tensor]
    items: Callable[[Batch], int] = count_label_tokens

    @classmethod
    def of(cls, function: Callable[[Any, Batch, Tensor], Tensor]) -> Objective:
        """Make an objective from a function of the outputs, the batch and the step's number of label tokens.

        The function returns a sum divided by that number.
        """
        return cls(lambda forward, batch, num_items: function(forward(), batch, num_items))

    @classmethod
    def mean(cls, function: Callable[[Any, Batch], Tensor]) -> Objective:
        """Make an objective from a function of the outputs and the batch that returns a mean.

        All micro-batches have equal weights.
        """
        return cls(lambda forward, batch, num_items: function(forward(), batch) / num_items, one_item)


def next_token_loss(outputs: Any, batch: Batch, num_items: Tensor) -> Tensor:
    """Return the cross-entropy of each next token as Hugging Face's causal models do, for models without a loss."""
    logits, labels = outputs.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / num_items


def one_item(batch: Batch) -> int:
    """Return 1 for a micro-batch with labels, or 0 for one that only fills a schedule."""
    return int(count_label_tokens(batch) > 0)


def attach_items(batch: Batch, items: int) -> None:
    """Attach the number of items to a micro-batch on the device, for `attached_items`."""
    setattr(batch["labels"], _ITEMS, items)


def attached_items(batch: Batch) -> int:
    """Return the number of items that `attach_items` attached to a micro-batch."""
    return getattr(batch["labels"], _ITEMS)


class Minimised:
    """Wrapper of an objective that checks once that the loss is divided by ``num_items``."""

    def __init__(self, objective: Objective) -> None:
        self.items = objective.items
        self._loss = objective.loss
        self._pair: tuple[Tensor, Tensor] | None = None
        self._looked = False

    def __call__(self, forward: Forward, batch: Batch, num_items: Tensor) -> Tensor:
        """Return the loss of a micro-batch. The first call with gradients also computes it for twice as many items.

        Raises:
            ValueError: the loss is not a scalar tensor, or called the forward more than once.
        """
        once = _Once(forward)
        loss = self._loss(once, batch, num_items)
        if not isinstance(loss, Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss: returned {found}; return a scalar tensor, the sum over items / num_items")
        if not self._looked and torch.is_grad_enabled():
            with torch.no_grad():
                self._pair = loss.detach(), self._loss(once.again, batch, 2 * num_items).detach()
            self._looked = True
        return loss

    def require_sums(self) -> None:
        """Check once that the loss is divided by ``num_items``. This synchronises the device.

        Raises:
            ValueError: twice as many items did not halve the loss.
        """
        if self._pair is None:
            return
        loss, half = (float(value) for value in self._pair)
        self._pair = None
        if abs(loss - 2 * half) > 1e-3 * abs(loss) + 1e-6:
            raise ValueError(
                f"loss: {loss:.6g}, and {half:.6g} for twice as many items, so it is not divided by num_items and "
                "micro-batches would not add up; divide the sum over items by num_items, or declare it as a mean "
                "(weft.Objective.mean(function); of a Trainer loss_is_scaled_for_ga=False)"
            )


class _Once:
    """A forward that may be called once, and whose outputs `again` returns a second time."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._outputs: Any = None

    def __call__(self, **more: Any) -> Any:
        if self._outputs is not None:
            raise ValueError("loss: it runs the model twice; a pipeline runs it once for each micro-batch")
        self._outputs = self._forward(**more)
        return self._outputs

    def again(self, **more: Any) -> Any:
        """Return the same outputs again, with the model's own loss halved for twice the number of items."""
        outputs = type(self._outputs)(**self._outputs)
        if outputs.get("loss") is not None and "num_items_in_batch" in more:
            outputs["loss"] = outputs["loss"] / 2
        return outputs
