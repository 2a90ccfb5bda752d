"""One micro-batch as the stages want it, from what a data loader yields."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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
    tensors = {name: value.to(device, non_blocking=True) for name, value in batch.items() if isinstance(value, Tensor)}
    if "position_ids" not in tensors:
        tensors["position_ids"] = _positions(tensors)
    mask = tensors.get("attention_mask")
    if mask is not None and bool(mask.all()):
        del tensors["attention_mask"]  # nothing is padded, and kernels without a mask are faster
    return tensors


def _positions(tensors: Mapping[str, Tensor]) -> Tensor:
    """Position of each token among the tokens that are not padding."""
    ids = tensors["input_ids"]
    if "attention_mask" in tensors:
        return (tensors["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def count_label_tokens(batch: Mapping[str, Tensor]) -> int:
    """Tokens that a causal loss counts: labels after the first position that are not -100."""
    return int((batch["labels"][:, 1:] != -100).sum())
