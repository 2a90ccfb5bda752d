"""Export of adapters, in peft's format."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.shards import exported_dtype, write_tensors

BASE = "base_model"
"""Subfolder of an adapter's folder for the base model, if the base model was not loaded from a folder."""


def has(stage: Stage) -> bool:
    """True if a stage has adapters."""
    return isinstance(stage.model, peft.PeftModel)


def has_new_base(stage: Stage) -> bool:
    """True if the base model was not loaded from a folder, so that an export contains it besides the adapters."""
    return not stage.hf_model.config.name_or_path


def exported_frozen(stage: Stage) -> list[nn.Parameter]:
    """Return the frozen weights that an export writes.

    These are all of them, or only embeddings if the stage has adapters and its base model has a folder.
    """
    model = stage.hf_model
    parts: list[nn.Module | None] = [model]
    if has(stage) and not has_new_base(stage):
        parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [p for part in parts if part is not None for p in part.parameters() if not p.requires_grad]


def write_part(stage: Stage, folder: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Write the tensors of one stage that peft saves into a file per adapter, and return their names.

    Without adapters, write nothing and return an empty list. Besides adapters, peft saves an embedding that was
    resized, that has an adapter, or that has trained tokens.

    Args:
        dtype: type of the exported weights. None uses each weight's original type.
    """
    model = stage.model
    if not isinstance(model, peft.PeftModel):
        return []
    state = model.state_dict()
    named = dict(model.named_parameters(remove_duplicate=False))
    types = {id(value): exported_dtype(named[key], dtype) for key, value in state.items() if key in named}
    names = []
    for adapter in model.peft_config:
        with warnings.catch_warnings():  # peft repeats its warning about embeddings for each stage
            warnings.simplefilter("ignore")
            weights = peft.get_peft_model_state_dict(model, state, adapter_name=adapter)
        names.append(str(_folder_of(adapter) / f"stage-{stage.index:05d}.safetensors"))
        (folder / names[-1]).parent.mkdir(exist_ok=True)
        write_tensors(
            {key: value.to(types.get(id(value), value.dtype)) for key, value in weights.items()}, folder / names[-1]
        )
    return names


def _folder_of(adapter: str) -> Path:
    """Return the folder in which peft saves an adapter, within that of the model."""
    return Path("." if adapter == "default" else adapter)


def merge(parts: Sequence[str], folder: Path) -> None:
    """Merge the stages' files into one file per adapter, and delete them."""
    weights: dict[Path, dict[str, Tensor]] = {}
    for part in map(Path, parts):
        weights.setdefault(part.parent, {}).update(load_file(folder / part))
        (folder / part).unlink()
    for parent, tensors in weights.items():
        write_tensors(tensors, folder / parent / "adapter_model.safetensors")


def write_config(stage: Stage, folder: Path, base_path: str | None) -> None:
    """Write the configuration of each adapter, which all stages with adapters share.

    Args:
        base_path: path of the base model. None keeps the path in the adapters' configuration.
    """
    for adapter, given in stage.model.peft_config.items():
        config = copy.deepcopy(given)
        known = config.base_model_name_or_path or stage.hf_model.config.name_or_path
        config.base_model_name_or_path = base_path or known
        config.inference_mode = True
        config.save_pretrained(str(folder / _folder_of(adapter)))
