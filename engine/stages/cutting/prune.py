"""Pruning of a Hugging Face model to one virtual stage, without changes to its forward."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from weft.engine.models.skeleton import Placeholder
from weft.engine.stages.cutting.boundary import BoundaryTracer
from weft.engine.stages.cutting.outline import Outline
from weft.engine.stages.cutting.placeholders import Downstream, EntryLayer, ExitLayer, SkippedLayer, Upstream, move_kept
from weft.engine.stages.cutting.port import Feed, Port


def prune(model: PreTrainedModel, outline: Outline, window: range) -> frozenset[str]:
    """Remove the modules of other stages in place, possibly on the meta device.

    An embedding that is tied to the head also stays on the last stage, where `open_port` replaces its forward.

    Args:
        window: the stage's decoder layers.

    Returns:
        Names of the parameters that both the first and the last stage have.
    """
    tied = _tied_sources(model, outline)
    layers = model.get_submodule(outline.layers)
    assert isinstance(layers, nn.ModuleList)
    for index in range(len(layers)):
        if index not in window:
            layers[index] = SkippedLayer(layers[index], outline.answer_length)
    is_last = window.stop == outline.num_layers
    for unit in outline.before if window.start > 0 else ():
        if not (is_last and any(_in(name, (unit,)) for name in tied)):
            replace_module(model, unit, Placeholder(model.get_submodule(unit)))
    for unit in () if is_last else outline.after:
        replace_module(model, unit, Downstream(model.get_submodule(unit)))
    for name in (*(outline.own_before if window.start > 0 else ()), *(() if is_last else outline.own_after)):
        _drop_weight(model, name)
    _forget_foreign_ties(model)
    return tied


def open_port(model: PreTrainedModel, outline: Outline, window: range, tied: frozenset[str]) -> Port:
    """Insert entry and exit layers into a pruned model whose weights were loaded, and return their port."""
    tracer = None if outline.plain else BoundaryTracer(type(model), model.config, outline.layers)
    port = Port(window, outline.num_layers, tracer)
    layers = model.get_submodule(outline.layers)
    assert isinstance(layers, nn.ModuleList)
    if window.start > 0:
        layers[window.start - 1] = EntryLayer(layers[window.start - 1], outline.answer_length, port)
        for unit in outline.before:
            original = model.get_submodule(unit)
            keep = {name.removeprefix(f"{unit}.") for name in tied if _in(name, (unit,))}
            replace_module(model, unit, move_kept(original, keep, Upstream(original, port)))
        for index in window:
            layers[index].register_forward_pre_hook(Feed(port, index), with_kwargs=True)
    for unit in outline.after if window.stop < outline.num_layers else ():
        replace_module(model, unit, Downstream(model.get_submodule(unit), port))
    for index in range(window.stop, outline.num_layers):
        layers[index] = ExitLayer(layers[index], outline.answer_length, port, index)
    return port


def _tied_sources(model: PreTrainedModel, outline: Outline) -> frozenset[str]:
    """Return names of parameters before the layers that modules after the layers also use.

    These are embeddings that the configuration ties, and other shared parameters such as peft's trained tokens.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    after = {parameter for name, parameter in named if _in(name, outline.after)}
    shared = {name for name, parameter in named if parameter in after and _in(name, outline.before)}
    return frozenset(shared) | {
        source
        for target, source in model.all_tied_weights_keys.items()
        if _in(source, outline.before) and _in(target, outline.after)
    }


def _in(name: str, units: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{unit}.") for unit in units)


def _forget_foreign_ties(model: PreTrainedModel) -> None:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = model.all_tied_weights_keys
    model.all_tied_weights_keys = {t: s for t, s in ties.items() if t in names and s in names}


def _drop_weight(model: nn.Module, path: str) -> None:
    """Replace a parameter by a buffer of zeros with the same shape."""
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent)
    weight = getattr(module, name)
    delattr(module, name)
    module.register_buffer(name, torch.zeros_like(weight, requires_grad=False), persistent=False)


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at ``path`` by ``new``."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)
