"""Shards: files of one stage's weights, with the tensor names of Hugging Face's own export."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation, revert_weight_conversion

from weft.conf.schema import ModelConfig
from weft.engine.precision import given_dtype, set_given
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.folder import weight_types, weights_folder

SHARD_BYTES = 5_000_000_000
"""Largest size of a shard, as in transformers and on the hub."""
_WRAPPED = ("base_layer", "original_module", "token_adapter")
"""Attributes under which peft's modules store the module that they replace."""


@dataclass(frozen=True)
class Shard:
    """A file with some of a stage's weights."""

    stage: int
    """Virtual stage that the weights belong to."""
    number: int
    """Index of this shard among the stage's shards."""
    names: tuple[str, ...]
    """Names of the weights."""
    num_bytes: int
    """Size of the weights in bytes."""

    @property
    def file(self) -> str:
        """Temporary file name, used until the number of all shards is known."""
        return f"stage-{self.stage:05d}-{self.number:05d}.safetensors"


def write_shards(
    stage: Stage, folder: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> list[Shard]:
    """Write one stage's weights. Only the first stage writes a tied weight.

    Only one shard and one layer are copied at a time.

    Args:
        dtype: type of the exported weights. None uses each weight's original type.
        shard_bytes: largest size of a shard.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    shards: list[Shard] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        shard = Shard(stage.index, len(shards), tuple(pending), _size(pending))
        write_tensors(pending, folder / shard.file)
        shards.append(shard)
        pending.clear()

    model = stage.hf_model
    named = model.named_parameters(remove_duplicate=False)
    types = {base_name(model, name): exported_dtype(parameter, dtype) for name, parameter in named}
    for weights in _parts(own_weights(stage)):
        part = {name: value.to(types.get(name, value.dtype)) for name, value in weights.items()}
        original = revert_weight_conversion(stage.hf_model, part)
        if pending and _size(pending) + _size(original) > shard_bytes:
            flush()
        pending.update(original)
    if pending:
        flush()
    return shards


def exported_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of an exported weight: its own if it is an integer, else ``dtype``, else its original type."""
    return parameter.dtype if not parameter.is_floating_point() else dtype or given_dtype(parameter)


def exported_bytes(stage: Stage, dtype: torch.dtype | None) -> int:
    """Estimate the size of a stage's export in bytes. A tied weight counts only for the first stage."""
    adapted = stage.model is not stage.hf_model and bool(stage.hf_model.config.name_or_path)
    return sum(
        (prod(stage.cuts[name].shape) if name in stage.cuts else parameter.numel())
        * exported_dtype(parameter, dtype).itemsize
        for name, parameter in stage.named_global_parameters()
        if (parameter.requires_grad or not adapted) and (stage.is_first or name not in stage.tied)
    )


def own_weights(stage: Stage) -> dict[str, Tensor]:
    """Return the weights that a stage contributes to the whole model, without adapters.

    Each weight of the model is contributed by one stage.
    """
    model = stage.hf_model
    elsewhere = set(model.all_tied_weights_keys) | set(model._keys_to_ignore_on_save or ())
    if not stage.is_first:
        elsewhere |= {name.removeprefix(_wrapper(stage)) for name in stage.tied}
    named = ((base_name(model, name), name, value) for name, value in model.state_dict().items())
    return {base: value for base, name, value in named if base is not None and not {base, name} & elsewhere}


def _wrapper(stage: Stage) -> str:
    """Return the prefix that peft's wrapper adds to names, or an empty string without the wrapper."""
    return stage.prefix or ("" if stage.model is stage.hf_model else "base_model.model.")


def base_name(model: nn.Module, name: str) -> str | None:
    """Return a tensor's name in the model without peft, or None for a tensor of peft's own."""
    path, module = list[str](), model
    for part in name.split("."):
        inside = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if not inside:
            path.append(part)
        elif part not in _WRAPPED:
            return None
        module = getattr(module, part)
    return ".".join(path)


def _parts(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights one decoder layer at a time, to limit the memory of their conversion."""
    part: dict[str, Tensor] = {}
    number = None
    for name, value in weights.items():
        layer = next((piece for piece in name.split(".") if piece.isdigit()), None)
        if part and layer != number:
            yield part
            part = {}
        number = layer
        part[name] = value
    if part:
        yield part


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file durably. Tensors that share memory are written separately."""
    own: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        copied = tensor.detach().to("cpu").contiguous()
        own[name] = copied.clone() if (memory := copied.untyped_storage().data_ptr()) in taken else copied
        taken.add(memory)
    save_file(own, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


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
