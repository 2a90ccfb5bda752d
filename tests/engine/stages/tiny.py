"""Ways to make and run tiny models whole and in stages."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.engine.stages.tiny_models import TINY, VOCABULARY, tiny_model
from weft.conf.schema import ModelConfig, SplitKind
from weft.engine.models.batch import Batch
from weft.engine.stages.checking.comparison import run_stages as run
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.cutting.stage import Stage
from weft.engine.stages.files.loading import build_model, load_hf_config, load_stages

ARCHITECTURES = tuple(TINY)
tiny = tiny_model


def batch(size: int = 2, length: int = 10, *, seed: int = 0, packed: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    positions = torch.arange(length)
    if packed:
        positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions.repeat(size, 1)}


def stages_of(config: ModelConfig, count: int, *, dtype=torch.float32, seed: int = 1) -> list[Stage]:
    split = split_layers(load_hf_config(config), count, SplitKind.even)
    return load_stages(config, split, range(count), dtype=dtype, seed=seed)


def logits(stages: list[Stage], data: Batch) -> Tensor:
    return stages[-1].logits(run(stages[:-1], data), data)


def gradients(stages: list[Stage]) -> dict[str, Tensor]:
    return {n: p.grad for stage in stages for n, p in stage.named_global_parameters() if p.requires_grad}


def whole(config: ModelConfig, *, dtype=torch.float32, seed: int = 1):
    return build_model(config, dtype=dtype, seed=seed)
