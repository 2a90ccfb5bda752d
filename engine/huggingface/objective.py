"""The Trainer's loss as an objective: runs its `compute_loss` on the last stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from weft.engine.models.batch import Batch
from weft.engine.models.objective import Forward, Objective, one_item
from weft.engine.models.skeleton import hf_model

SAME = ("input_ids", "attention_mask", "position_ids")
"""Inputs that the pipeline's layers have already used when the loss is computed."""


def trainer_objective(trainer: Trainer) -> Objective | None:
    """Return an objective that runs the Trainer's `compute_loss`, or None if the Trainer uses the model's own loss.

    The result of ``compute_loss`` for ``num_items_in_batch`` is summed over micro-batches and replicas, as on a single
    process. If the Trainer would divide the result by the accumulation steps, it is treated as a mean, and
    micro-batches have equal weights. ``loss_is_scaled_for_ga`` decides this. If it is None, the result is a mean unless
    the model takes ``num_items_in_batch`` or ``compute_loss_func`` is set.
    """
    own = type(trainer).compute_loss is not Trainer.compute_loss
    if not own and trainer.compute_loss_func is None and trainer.label_smoother is None:
        return None
    counted = trainer.loss_is_scaled_for_ga
    if counted is None:
        counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None

    def loss(forward: Forward, batch: Batch, num_items: Tensor) -> Tensor:
        model = LastStage(trainer.model, forward, batch)
        with _on_one_process(trainer):
            if counted:
                return trainer.compute_loss(model, dict(batch), num_items_in_batch=num_items)
            return trainer.compute_loss(model, dict(batch)) / num_items

    return Objective(loss) if counted else Objective(loss, one_item)


class LastStage(nn.Module):
    """The model that `compute_loss` receives.

    It returns the outputs of the micro-batch that ran through the pipeline.
    """

    def __init__(self, model: nn.Module, forward: Forward, batch: Batch) -> None:
        super().__init__()
        self._whole = (hf_model(model),)  # not a child: its weights are the stages'
        self._run = forward
        self._batch = batch

    @property
    def config(self) -> Any:
        """Config of the Hugging Face model."""
        return self._whole[0].config

    def forward(self, **inputs: Any) -> Any:
        """Return the outputs of the micro-batch.

        Raises:
            ValueError: the inputs are not the micro-batch's own tensors.
        """
        for name in SAME:
            if inputs.get(name) is not None and inputs[name] is not self._batch.get(name):
                raise ValueError(
                    f"compute_loss: it gives the model another {name}; a pipeline has run the layers on the "
                    "micro-batch's own before the loss is computed"
                )
        return self._run(**{name: value for name, value in inputs.items() if name not in (*SAME, "use_cache")})

    def _get_name(self) -> str:
        return type(self._whole[0]).__name__


@contextmanager
def _on_one_process(trainer: Trainer) -> Iterator[None]:
    """Context in which `compute_loss` neither gathers from other ranks nor scales for them.

    Only the last stage's ranks call it.
    """
    accelerator, args = trainer.accelerator, trainer.args
    alone = ("gather", "gather_for_metrics", "reduce")
    args.average_tokens_across_devices, scaled = False, args.average_tokens_across_devices
    for name in alone:
        setattr(accelerator, name, _itself)
    try:
        yield
    finally:
        for name in alone:
            delattr(accelerator, name)
        args.average_tokens_across_devices = scaled


def _itself(value: Any, *_: Any, **__: Any) -> Any:
    return value
