"""The weights of a run's checkpoints as Hugging Face folders, from which its prefill workers load them."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from weft.conf.schema import ModelConfig
from weft.engine.checkpoint import Checkpoint
from weft.engine.models.skeleton import model_class
from weft.engine.stages.files.loading import load_hf_config

WEIGHT = "weight/"
"""Prefix of weights among the tensors of a checkpoint."""
VOCABULARY = "model.overrides.vocab_size"
KEPT = 2
"""Number of folders to keep: the newest, and one from which a worker may still be loading."""


def write_weights(checkpoint: Checkpoint, model: ModelConfig, tokenizer_folder: Path, target: Path) -> None:
    """Write a checkpoint's model into the folder ``target``, which is there as a whole or not at all.

    Args:
        tokenizer_folder: folder whose files are copied, so that a worker can start with ``target``.

    Raises:
        CheckpointError: the checkpoint is damaged, or has been removed.
        OSError: the folder cannot be written.
    """
    settings = checkpoint.meta.get("origin", {}).get("settings", {})
    if not model.path and VOCABULARY in settings:  # a new model's follows from its tokenizer
        model = replace(model, overrides={**model.overrides, "vocab_size": settings[VOCABULARY]})
    hf_config = load_hf_config(model)
    with torch.device("meta"):
        built = model_class(hf_config)._from_config(hf_config)
    names = [name for name in built.state_dict() if f"{WEIGHT}{name}" in checkpoint.names]  # a tied head has none
    dtype = hf_config.dtype or torch.float32
    state = {name: checkpoint.load([f"{WEIGHT}{name}"])[f"{WEIGHT}{name}"].to(dtype) for name in names}
    draft = target.with_name(f".{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    built.save_pretrained(draft, state_dict=state)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, draft)
    draft.rename(target)


def remove_older(folder: Path) -> None:
    """Remove all weights in ``folder`` except for the newest `KEPT`."""
    for old in sorted(path for path in folder.iterdir() if not path.name.startswith("."))[:-KEPT]:
        with suppress(OSError):
            shutil.rmtree(old)
