"""Export of the trained model as a Hugging Face folder. Every rank writes its stages."""

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
from weft.engine.precision import exact_value
from weft.engine.stages.files.exporting import export_stages, rehearse_export
from weft.engine.stages.files.shards import Shard, exported_dtype


def export(
    trained: Trained,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model as a Hugging Face folder. Collective call.

    Args:
        dtype: type of the exported weights. None means each weight's original type.

    Raises:
        ValueError: see `weft.engine.stages.files.exporting.export_stages`.
        NonFiniteError: the model has non-finite values. Nothing was written.
    """
    trained.check_finite()
    writes = trained.layout.position(trained.global_rank).line == 0
    stages = list(trained.module.stages.values()) if writes else []
    with trained.sharding.full_weights(), _exported_values(trained, dtype, keep=writes):
        export_stages(stages, folder, rank=dist.get_rank(), gather=_gather_all, tokenizer=tokenizer, dtype=dtype)


def check_export(
    trained: Trained,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Check before training that an export can be written. Collective call.

    Raises:
        ValueError: see `weft.engine.stages.files.exporting.rehearse_export`.
    """
    writes = trained.layout.position(trained.global_rank).line == 0
    stages = list(trained.module.stages.values()) if writes else []
    rehearse_export(stages, folder, rank=dist.get_rank(), gather=_gather_all, tokenizer=tokenizer, dtype=dtype)


@contextmanager
def _exported_values(trained: Trained, dtype: torch.dtype | None, *, keep: bool) -> Iterator[None]:
    """Set parameters to complete values, as precise as the export's type, on ranks that ``keep`` them.

    At the end of the context the parameters are restored.

    Values that differ from the parameters of computations are in host memory. Collective call over the ranks that
    hold parts of the parameters.
    """
    replaced: list[tuple[nn.Parameter, Tensor]] = []
    cuts = {name: cut for stage in trained.module.stages.values() for name, cut in stage.cuts.items()}
    try:
        for name, parameter, value in _precise(trained, dtype):
            cut = cuts.get(name)
            if cut is not None:
                group: AxisGroup = getattr(trained.axes, cut.axis)
                held = group.all_gather(value.contiguous().view(1, -1)).wait()
                if keep:
                    value = torch.empty(cut.shape, dtype=held.dtype)
                    for index, part in enumerate(held):
                        replace(cut, index=index).put(part.view(cut.held_shape), value)
            if keep and value.data_ptr() != parameter.data_ptr():
                replaced.append((parameter, parameter.data))
                parameter.data = value.cpu() if value.device.type != "cpu" else value.clone()
        yield
    finally:
        for parameter, part in replaced:
            parameter.data = part


def _precise(trained: Trained, dtype: torch.dtype | None) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield every parameter with its name and its value for the export.

    If the export's type is not the parameter's, the value is the master weight's or the original one.
    """
    named = dict(trained.module.named_global_parameters())
    for bucket in trained.sharding.buckets:
        members = [member for member in bucket.members if member.name in named]
        others = [m for m in members if exported_dtype(m.parameter, dtype) != m.parameter.dtype]
        if bucket.has_masters and others:
            whole = bucket.whole_master()
            for member in members:
                yield member.name, named.pop(member.name), member.of(whole)
    for name, parameter in named.items():
        exact = exact_value(parameter) if exported_dtype(parameter, dtype) != parameter.dtype else None
        yield name, parameter, parameter.detach() if exact is None else exact


def _gather_all(value: Any) -> list[Any]:
    return gather(value, kinds=(Shard,))
