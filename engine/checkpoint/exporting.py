"""Export of the trained model as a Hugging Face folder; every rank writes its stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from weft.comm.exchange import gather
from weft.engine.checkpoint.trained import Trained
from weft.engine.parallel.axis import AxisGroup
from weft.engine.stages import export_stages
from weft.engine.stages.shards import Shard


def export(trained: Trained, folder: Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write the model as a Hugging Face folder; a collective call.

    Raises:
        ValueError: see `weft.engine.stages.export_stages`.
        NonFiniteError: the model has non-finite values; nothing was written.
    """
    trained.check_finite()
    writes = trained.layout.position(trained.global_rank).line == 0
    stages = list(trained.module.stages.values()) if writes else []
    with trained.sharding.full_weights(), _whole_parameters(trained, keep=writes):
        export_stages(stages, folder, rank=dist.get_rank(), gather=_gather_all, tokenizer=tokenizer)


@contextmanager
def _whole_parameters(trained: Trained, *, keep: bool) -> Iterator[None]:
    """Context in which parameters that ranks hold parts of are whole, in host memory, on ranks that ``keep`` them.

    A collective call over the ranks that share layers.
    """
    parts: list[tuple[nn.Parameter, Tensor]] = []
    cuts = {name: cut for stage in trained.module.stages.values() for name, cut in stage.cuts.items()}
    for name, parameter in trained.module.named_global_parameters():
        if (cut := cuts.get(name)) is None:
            continue
        group: AxisGroup = getattr(trained.axes, cut.axis)
        held = group.all_gather(parameter.detach().contiguous().view(1, -1)).wait()
        if keep:
            whole = torch.empty(cut.shape, dtype=held.dtype)
            for index, part in enumerate(held):
                replace(cut, index=index).put(part.view(cut.held_shape), whole)
            parts.append((parameter, parameter.data))
            parameter.data = whole
    try:
        yield
    finally:
        for parameter, part in parts:
            parameter.data = part


def _gather_all(value: Any) -> list[Any]:
    return gather(value, kinds=(Shard,))
