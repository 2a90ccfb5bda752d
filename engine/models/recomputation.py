"""Recomputation of a model's layers, of their attention or of their element-wise operations, in the backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from weft.conf.schema import Recompute
from weft.engine.models.elementwise import recompute_elementwise
from weft.engine.models.skeleton import decoder_layers


def attention_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of attention in a decoder layer, which Hugging Face's class names tell."""
    found: list[nn.Module] = []
    for child in layer.children():
        found += [child] if "Attention" in type(child).__name__ else attention_modules(child)
    return found


def recompute(model: PreTrainedModel, kind: Recompute) -> None:
    """Let the backward of ``model``, which may be a part of a model, compute ``kind`` of each layer again.

    Raises:
        ValueError: the model does not support it.
    """
    if kind is Recompute.layers and not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif kind is Recompute.attention:
        for module in require_attention(model):
            module.forward = partial(_again_in_backward, module, module.forward)
    elif kind is Recompute.elementwise:
        for layer in model.get_submodule(decoder_layers(model)).children():
            layer.forward = partial(recompute_elementwise, layer, layer.forward)


def require_attention(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of attention of a model. Raise ValueError if it has none."""
    layers = model.get_submodule(decoder_layers(model))
    found = [module for layer in layers.children() for module in attention_modules(layer)]
    if not found and any(True for _ in layers.children()):
        raise ValueError(
            f"pipeline.recompute=attention: {type(model).__name__} has no module whose class is named Attention; "
            "set pipeline.recompute=layers or none"
        )
    return found


def _again_in_backward(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not module.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
