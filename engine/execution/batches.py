"""One micro-batch as the stages want it, from what a data loader yields."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.engine.stages.packed import PackedRows, tell_packed


def prepare_batch(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Check a micro-batch, add position ids where there are none, move it to ``device``.

    Args:
        batch: ``input_ids`` [B, S]; ``labels`` [B, S] with -100 for ignored tokens; optional
            ``position_ids`` [B, S] and ``attention_mask`` [B, S].

    Raises:
        ValueError: the form is another.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch or "labels" not in batch:
        found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"micro-batch: found {found}; yield a dict with input_ids [B, S] and labels [B, S] "
            "(-100 = ignored), as Hugging Face models take"
        )
    given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if "position_ids" not in given:
        given["position_ids"] = _positions(given)
    mask = given.get("attention_mask")
    # Kernels without a mask are faster; but one that is on the device already is not waited for.
    if mask is not None and mask.device.type == "cpu" and bool(mask.all()):
        del given["attention_mask"]
    moved = {name: value.to(device, non_blocking=True) for name, value in given.items()}
    if given["position_ids"].device.type == "cpu":
        rows = PackedRows.of(given["position_ids"])
        tell_packed(moved["position_ids"], rows and rows.to(device))
    return moved


def _positions(tensors: Mapping[str, Tensor]) -> Tensor:
    """Position of each token among the tokens that are not padding."""
    mask = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"]))
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
