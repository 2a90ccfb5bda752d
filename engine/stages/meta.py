"""The trained model on the meta device: modules, names and trained weights, without memory."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from weft.conf.schema import LoraConfig
from weft.engine.stages.lora import add_adapters
from weft.engine.stages.skeleton import model_class, skeleton


def meta_model(trained: PreTrainedConfig | nn.Module, lora: LoraConfig | None = None) -> nn.Module:
    """Return the whole model in its trained form, with adapters.

    Args:
        trained: config of a model that will be made, or a model (or peft's around one), which is not changed.
        lora: adapters of a model that will be made.

    Raises:
        ValueError: transformers cannot build it, or its adapters have no targets.
    """
    if isinstance(trained, nn.Module):
        return _copy(trained)
    model = skeleton(model_class(trained), trained)
    return model if lora is None or not lora.enabled else add_adapters(model, lora, seed=0)


def _copy(model: nn.Module) -> nn.Module:
    """Copy a model without its weights."""
    tensors: dict[int, Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, tensors | {id(buffer): buffer.to("meta") for buffer in model.buffers()})
