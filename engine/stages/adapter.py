"""Export of adapters, in peft's format."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import peft
from safetensors.torch import load_file
from torch import Tensor

from weft.engine.stages.shards import write_tensors
from weft.engine.stages.stage import Stage

BASE = "base_model"
"""Folder, inside an adapter's, of a base model that has no folder of its own."""


def has(stage: Stage) -> bool:
    """Whether a stage has adapters."""
    return isinstance(stage.model, peft.PeftModel)


def has_new_base(stage: Stage) -> bool:
    """Whether the base model was not loaded from anywhere, so that adapters alone would be of no use."""
    return not stage.hf_model.config.name_or_path


def write_part(stage: Stage, folder: Path) -> list[str]:
    """Write one stage's adapters, if it has any, into a file of this name."""
    model = stage.model
    if not isinstance(model, peft.PeftModel):
        return []
    name = f"stage-{stage.index:05d}.safetensors"
    weights = peft.get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    write_tensors(weights, folder / name)
    return [name]


def merge(stage: Stage, parts: Sequence[str], folder: Path, base_path: str | None) -> None:
    """One file and its config out of the stages' parts.

    Args:
        stage: any of them; all have one config.
        parts: their files.
        base_path: of the base model, where the adapters' config does not say it.
    """
    weights: dict[str, Tensor] = {}
    for part in parts:
        weights |= load_file(folder / part)
        (folder / part).unlink()
    write_tensors(weights, folder / "adapter_model.safetensors")
    config = copy.deepcopy(stage.model.active_peft_config)
    config.base_model_name_or_path = base_path or config.base_model_name_or_path
    config.inference_mode = True
    config.save_pretrained(str(folder))
