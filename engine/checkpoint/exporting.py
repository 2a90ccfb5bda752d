"""Export of the trained model as a Hugging Face folder; every rank writes its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from weft.comm.exchange import gather
from weft.engine.checkpoint.trained import Trained
from weft.engine.stages import export_stages
from weft.engine.stages.shards import Shard


def export(trained: Trained, folder: Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write the model as a Hugging Face folder; a collective call.

    Raises:
        ValueError: see `weft.engine.stages.export_stages`.
        NonFiniteError: the model has non-finite values; nothing was written.
    """
    trained.check_finite()
    stages = list(trained.module.stages.values()) if trained.replica == 0 else []
    with trained.sharding.full_weights():
        export_stages(stages, folder, rank=dist.get_rank(), gather=_gather_all, tokenizer=tokenizer)


def _gather_all(value: Any) -> list[Any]:
    return gather(value, kinds=(Shard,))
