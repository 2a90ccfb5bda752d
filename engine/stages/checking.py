"""The self-check: a small copy of an architecture, run by Hugging Face as a whole and in stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from weft.conf.schema import ModelConfig, SplitKind
from weft.engine.stages.from_model import stages_from_model
from weft.engine.stages.loading import load_hf_config
from weft.engine.stages.refusals import refuse_unfaithful
from weft.engine.stages.shrink import shrunken_model
from weft.engine.stages.skeleton import causal_config, model_class
from weft.engine.stages.split import split_layers
from weft.engine.stages.stage import Batch, Stage, hf_model

TOLERANCE = 1e-5
"""Largest difference, as a share of the largest value; it is 0 for every architecture that works."""

_REMEDY = "choose another architecture, or run it whole with pipeline.stages=1"


def self_check(
    model: PreTrainedConfig | ModelConfig | nn.Module, *, num_stages: int = 0, packing: bool = False
) -> None:
    """Compare stages with Hugging Face's own run, on a small copy: logits, loss and gradients.

    Args:
        model: a config, or a model, which is left alone.
        num_stages: of the small copy; 0 puts each of its layers on a stage of its own.
        packing: also check that packed documents do not see each other.

    Raises:
        ValueError: naming the architecture, what differs, and what to do.
    """
    cls, config = _architecture(model)
    refuse_unfaithful(config)
    small = shrunken_model(cls, config, min_layers=max(2, num_stages)).train()
    _roughen(small)
    split = split_layers(small.config, num_stages or _num_layers(small), SplitKind.even)
    stages = stages_from_model(copy.deepcopy(small), split, range(split.num_stages))
    batch, num_items = _batch(small), torch.tensor(23)
    inputs = stages[0].accepted(batch, labels=batch["labels"], num_items_in_batch=num_items)
    want = small(**inputs, use_cache=False)
    want.loss.backward()
    try:
        logits, loss, half = _run(stages, batch, num_items)
    except Exception as error:  # any: it is Hugging Face's code, run in a way it does not know
        raise ValueError(
            f"model: {cls.__name__} does not run in stages ({type(error).__name__}: {error}); {_REMEDY}"
        ) from error
    _require_close(cls, "logits", logits, want.logits)
    _require_close(cls, "loss", loss, want.loss)
    _require_same_gradients(cls, gradients(stages), {name: p.grad for name, p in small.named_parameters()})
    if not torch.allclose(2 * half, loss):
        raise ValueError(
            f"model: {cls.__name__} does not divide its loss by num_items_in_batch, so micro-batches cannot be "
            f"weighed by their tokens; {_REMEDY}"
        )
    if packing:
        _require_apart(cls, small.eval())


def check_packing(model: PreTrainedConfig | ModelConfig | nn.Module) -> None:
    """Check on a small copy that packed documents do not see each other.

    Raises:
        ValueError: they do.
    """
    cls, config = _architecture(model)
    _require_apart(cls, shrunken_model(cls, config, min_layers=2))


def _run(stages: Sequence[Stage], batch: Batch, num_items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, loss (with gradients accumulated), and the loss over twice as many items."""
    with torch.no_grad():
        hidden = run_stages(stages[:-1], batch)
        logits, half = stages[-1].logits(hidden, batch), stages[-1](hidden, batch, 2 * num_items)
    loss = run_stages(stages, batch, num_items)
    assert loss is not None
    loss.backward()
    return logits, loss, half


def _num_layers(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_hidden_layers


def _architecture(
    model: PreTrainedConfig | ModelConfig | nn.Module,
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    if isinstance(model, nn.Module):
        return type(hf_model(model)), hf_model(model).config
    config = load_hf_config(model) if isinstance(model, ModelConfig) else causal_config(model)
    return model_class(config), config


def _roughen(model: PreTrainedModel) -> None:
    """Move weights off their first values, where norms and biases are the same on every layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def _batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two sequences of 12 tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(12).repeat(2, 1)}


def run_stages(stages: Sequence[Stage], batch: Batch, num_items: Tensor | None = None) -> Tensor | None:
    """One micro-batch through consecutive first stages in this process: a hidden state, or the loss."""
    hidden = None
    for stage in stages:
        hidden = stage(hidden, batch, num_items)
    return hidden


def gradients(stages: Sequence[Stage]) -> dict[str, Tensor | None]:
    """Gradients by the parameters' names in the whole model."""
    return {name: p.grad for stage in stages for name, p in stage.named_global_parameters()}


def _require_close(cls: type, what: str, got: Tensor, want: Tensor) -> None:
    difference = float((got.detach() - want.detach()).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(want.detach().abs().max())):
        raise ValueError(
            f"model: {cls.__name__} in stages differs from Hugging Face's own run, {what} by {difference:.2g}; "
            f"{_REMEDY}"
        )


def _require_same_gradients(cls: type, got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> None:
    if got.keys() != want.keys():
        raise ValueError(
            f"model: {cls.__name__} in stages has other weights than the whole: "
            f"{', '.join(sorted(got.keys() ^ want.keys())[:4])}; {_REMEDY}"
        )
    for name, gradient in want.items():
        zero = torch.zeros(())
        ours = got[name]
        _require_close(
            cls, f"gradient of {name}", zero if ours is None else ours, zero if gradient is None else gradient
        )


def _require_apart(cls: type, model: PreTrainedModel) -> None:
    """Changing the first of two packed documents must leave the second one's logits as they are."""
    ids = _batch(model)["input_ids"]
    other = ids.clone()
    other[:, :5] = ids[:, :5].flip(1)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)
    with torch.no_grad():
        one, two = (model(input_ids=i, position_ids=positions, use_cache=False).logits[:, 5:] for i in (ids, other))
    difference = float((one - two).abs().max())
    if difference > 1e-4 * float(one.abs().max()):  # a mixture of experts rounds a little differently
        raise ValueError(
            f"data.packing=true: {cls.__name__} lets packed documents see each other "
            f"(logits differ by {difference:.2g}); set data.packing=false"
        )
