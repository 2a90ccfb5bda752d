"""Types of a model's weights in its folder, in memory before training, and in the export."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from weft.conf.schema import ModelConfig
from weft.engine.precision import set_given
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.folder import weight_types, weights_folder
from weft.engine.stages.files.shards import base_name

_TYPES = {"F64": torch.float32, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def exact_type(config: ModelConfig, computed: torch.dtype) -> torch.dtype:
    """Return the type in which all weights can be loaded with the precision that training needs.

    Args:
        computed: type in which training computes.
    """
    if computed is torch.float32 or not config.path:
        return torch.float32
    if config.lora.enabled:
        return computed  # the base is frozen and not exported
    found = {_TYPES[name] for name in weight_types(weights_folder(config.path))}
    return found.pop() if len(found) == 1 else torch.float32


def base_type(config: ModelConfig, hf_config: PreTrainedConfig) -> torch.dtype:
    """Return the type of a base model's weights before training.

    A new model has fp32. Otherwise this is the configured type, if its files have weights of that type or are not
    safetensors files. Otherwise it is the only type in the files, or fp32 if they have several types.
    """
    said = hf_config.dtype
    if not config.path:
        return torch.float32
    found = {_TYPES[name] for name in weight_types(weights_folder(config.path))}
    if said in found or (not found and said is not None):
        return said
    return found.pop() if len(found) == 1 else torch.float32


def settle_types(stages: Iterable[Stage], base: torch.dtype, computed: torch.dtype) -> None:
    """Record the base model's types on the weights of stages, and cast buffers to the type of the computations."""
    for stage in stages:
        model = stage.hf_model
        kept_in_base, kept_in_training = _kept(model, base), _kept(model, computed)
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and base_name(model, name) is not None:
                set_given(parameter, torch.float32 if name in kept_in_base else base)
        saved = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point() and name not in kept_in_training:
                buffer.data = buffer.data.to(computed)


def _kept(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return names of weights and buffers that transformers keeps in fp32 when it loads a model in ``dtype``."""
    plan = model._get_dtype_plan(dtype)
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    return {name for name in model.state_dict() if pattern is not None and pattern.search(name)}
