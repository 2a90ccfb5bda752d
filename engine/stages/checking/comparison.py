"""Comparison of stages with Hugging Face's own run of the whole model, on a few micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.models.batch import Batch
from weft.engine.models.skeleton import hf_model
from weft.engine.stages.cutting.stage import Stage, accepted_arguments, global_names

OutputsLoss = Callable[[Any, Batch, Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    """The results of micro-batches.

    Attributes:
        logits: logits of all micro-batches, [B, S, V].
        loss: the sum of their losses.
        gradients: gradients summed over the micro-batches, by the parameters' names in the whole model.
    """

    logits: Tensor
    loss: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Differences of two outcomes, each relative to the largest expected value or to 1, whichever is larger."""

    logits: float
    loss: float
    gradients: float
    gradient: str
    """The parameter whose gradient differs most."""

    @property
    def worst(self) -> float:
        """Largest of the three differences. NaN counts as infinity."""
        return max(d if d == d else float("inf") for d in (self.logits, self.loss, self.gradients))


def whole_outcome(
    model: nn.Module, batches: Sequence[Batch], num_items: Tensor, loss: OutputsLoss | None = None
) -> Outcome:
    """Run the whole model by Hugging Face's (or peft's) own forward and backward, which sets its gradients.

    Args:
        loss: function of the outputs, the batch and ``num_items``, instead of the model's own loss.
    """
    takes = accepted_arguments(hf_model(model))

    def run(batch: Batch) -> tuple[Tensor, Tensor]:
        given = {**batch, "num_items_in_batch": num_items, "use_cache": False}
        if loss is not None:
            del given["labels"]
        output = model(**{name: value for name, value in given.items() if takes is None or name in takes})
        return output.logits, output.loss if loss is None else loss(output, batch, num_items)

    return _outcome(run, batches, [model])


def staged_outcome(stages: Sequence[Stage], batches: Sequence[Batch], num_items: Tensor) -> Outcome:
    """Run forward and backward of all stages in this process, and leave gradients in their parameters."""

    def run(batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = run_stages(stages[:-1], batch)
        if stages[-1].objective is None:
            output = stages[-1].output(hidden, batch, num_items)
            return output.logits, output.loss
        with torch.no_grad():
            logits = stages[-1].logits(hidden, batch)
        return logits, stages[-1](hidden, batch, num_items)

    return _outcome(run, batches, stages)


def _outcome(
    run: Callable[[Batch], tuple[Tensor, Tensor]], batches: Sequence[Batch], models: Sequence[nn.Module]
) -> Outcome:
    all_logits, losses = [], []
    for batch in batches:
        logits, loss = run(batch)
        loss.backward()
        all_logits.append(logits.detach())
        losses.append(loss.detach())
    return Outcome(torch.cat(all_logits), torch.stack(losses).sum(), gradients(models))


def run_stages(stages: Sequence[Stage], batch: Batch, num_items: Tensor | None = None) -> Tensor | None:
    """Run a micro-batch through consecutive stages in this process, from the first.

    Return the last of these stages' output: a hidden state, the loss if it is the model's last stage, or None without
    stages.
    """
    hidden = None
    for stage in stages:
        hidden = stage(hidden, batch, num_items)
    return hidden


def all_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter of whole models or stages once, with its name in the whole model."""
    seen: set[nn.Parameter] = set()
    for model in models:
        for name, parameter in model.named_global_parameters() if isinstance(model, Stage) else global_names(model):
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def gradients(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the existing gradients of whole models or stages, by the parameters' names in the whole model."""
    return {name: p.grad for name, p in all_parameters(models) if p.grad is not None}


def difference(got: Outcome, want: Outcome) -> Difference:
    """Compare an outcome with the expected one. A gradient that only one outcome has is compared with zero."""
    names = got.gradients.keys() | want.gradients.keys()
    off = {name: distance(got.gradients.get(name), want.gradients.get(name)) for name in sorted(names)}
    worst = max(off, key=lambda name: off[name] if off[name] == off[name] else float("inf"), default="")
    return Difference(
        distance(got.logits, want.logits), distance(got.loss, want.loss), off[worst] if worst else 0.0, worst
    )


def distance(got: Tensor | None, want: Tensor | None) -> float:
    """Return the largest absolute difference of two tensors, divided by the largest value of ``want`` or 1.

    The larger of the two divides. None counts as zero. Different shapes return infinity.
    """
    zero = torch.zeros(())
    got, want = (zero if x is None else x.detach().float() for x in (got, want))
    if got.dim() and want.dim() and got.shape != want.shape:
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
