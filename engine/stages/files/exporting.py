"""Export of a Hugging Face folder, by ranks that each have only their own stages."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME

from weft.comm.agreement import Gather, attempt
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files import adapter
from weft.engine.stages.files.shards import Shard, exported_bytes, exported_dtype, write_shards

STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers of the operating system for a disk that is full or read-only, which may pass."""


class ExportStorageError(ValueError):
    """An export that the disk does not take now, because it is full or read-only."""


def export_stages(
    stages: Sequence[Stage],
    folder: Path,
    *,
    rank: int = 0,
    gather: Gather = lambda value: [value],
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Atomically write a folder that plain transformers (or peft, for adapters) loads.

    Each writer writes its weights, then rank 0 adds config, index and tokenizer and renames the folder. The folder
    must be on a disk that all writers share. An existing folder is replaced.

    Args:
        stages: this writer's stages. Each stage must have exactly one writer.
        rank: this writer's rank, from 0.
        gather: all-gather among the writers. All of them must call this function.
        tokenizer: saved by rank 0.
        dtype: type of the exported weights. None uses each weight's original type.

    Raises:
        ExportStorageError: the disk is full or read-only. Raised on every writer, and nothing has changed.
        ValueError: a writer could not write, or the disk is not shared. Raised on every writer.
    """
    folder = Path(folder).expanduser().absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    together = _Together(gather, folder, partial)
    together.do(lambda: _start(partial) if rank == 0 else None)
    adapted = together.do(lambda: [stage.index for stage in stages if adapter.has(stage)])
    if any(adapted):
        base = all(together.do(lambda: not stages or adapter.has_new_base(stages[0])))
        if base:
            together.do(lambda: _start(partial / adapter.BASE) if rank == 0 else None)
            _write_model(stages, partial / adapter.BASE, together, rank, dtype)
        parts = together.do(lambda: [part for stage in stages for part in adapter.write_part(stage, partial, dtype)])
        base_path = str(folder / adapter.BASE) if base else None
        together.do(lambda: _merge_adapters(parts, partial) if rank == 0 else None)
        first = min(index for indices in adapted for index in indices)
        owner = next((stage for stage in stages if stage.index == first), None)
        together.do(lambda: adapter.write_config(owner, partial, base_path) if owner is not None else None)
    else:
        _write_model(stages, partial, together, rank, dtype)
    together.do(lambda: _publish(partial, folder, tokenizer) if rank == 0 else None)


def rehearse_export(
    stages: Sequence[Stage],
    folder: Path,
    *,
    rank: int = 0,
    gather: Gather = lambda value: [value],
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write and remove an export without its weights, to detect problems before training.

    Args:
        stages, folder, rank, gather, tokenizer, dtype: see `export_stages`.

    Raises:
        ValueError: a file cannot be written, or the weights need more space. Raised on every writer.
    """
    folder = Path(folder).expanduser().absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    together = _Together(gather, folder, partial, "correct it, or set train.export=false")
    num_bytes = sum(together.do(lambda: sum(exported_bytes(stage, dtype) for stage in stages)))

    def rehearse() -> None:
        _start(partial)
        free = shutil.disk_usage(partial).free
        if free < num_bytes:
            raise ValueError(f"{num_bytes / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB are free")
        adapted = [stage for stage in stages if adapter.has(stage)]
        if adapted:
            adapter.write_config(adapted[0], partial, None)
        if not adapted or adapter.has_new_base(stages[0]):
            _write_config(stages[0].hf_model, partial, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        shutil.rmtree(partial)

    together.do(lambda: rehearse() if rank == 0 else None)


@dataclass(frozen=True)
class _Together:
    """Runs a step on every writer. If it fails on one, the same error is raised on all."""

    gather: Gather
    folder: Path
    partial: Path
    remedy: str = "free space, or choose another train.output_dir"

    def do(self, step: Callable[[], Any]) -> list[Any]:
        outcome = attempt(step, self.gather, share=True)
        if (failure := outcome.failure) is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            of_storage = any(os.strerror(number) in failure.text for number in STORAGE)  # safetensors has its own error
            raise (ExportStorageError if of_storage else ValueError)(
                f"export: rank {failure.rank} could not write {self.folder} ({failure.kind}: "
                f"{' '.join(failure.text.split())}); nothing is left there but what was there before; {self.remedy}"
            ) from failure.cause
        return outcome.results


def _start(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_model(
    stages: Sequence[Stage], folder: Path, together: _Together, rank: int, dtype: torch.dtype | None
) -> None:
    parts = together.do(lambda: [shard for stage in stages for shard in write_shards(stage, folder, dtype=dtype)])
    together.do(lambda: _finish_model(stages, parts, folder, dtype) if rank == 0 else None)


def _finish_model(stages: Sequence[Stage], parts: list[list[Shard]], folder: Path, dtype: torch.dtype | None) -> None:
    """Rename the shards by transformers' scheme, and write their index and the config."""
    shards = sorted((s for part in parts for s in part), key=lambda shard: (shard.stage, shard.number))
    _require_files([shard.file for shard in shards], folder)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        (folder / shard.file).rename(folder / name)
        weight_map |= dict.fromkeys(shard.names, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(shard.num_bytes for shard in shards)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    _write_config(stages[0].hf_model, folder, dtype)


def _merge_adapters(parts: list[list[str]], folder: Path) -> None:
    flat = [part for written in parts for part in written]
    _require_files(flat, folder)
    adapter.merge(flat, folder)


def _require_files(files: Sequence[str], folder: Path) -> None:
    """Check that the files of all writers are visible on rank 0. Raise ValueError if a file is not visible."""
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise ValueError(
            f"{', '.join(absent)} not visible here, so the writers do not share this disk; "
            "set train.output_dir to a folder that every host mounts"
        )


def _write_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    weights = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    config.dtype = str(exported_dtype(next(weights), dtype)).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        # Unchanged, because `save_pretrained` rejects configs that transformers loads with a warning.
        model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)


def _publish(partial: Path, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Save the tokenizer, rename the finished folder, and remove an older folder of that name."""
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
