"""A micro-batch as stages take it, and how many of its tokens a causal loss counts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Batch = Mapping[str, Tensor]
"""``input_ids``, ``labels`` (-100 = ignored, not shifted) and ``position_ids``, each int64 [B, S];
optionally ``attention_mask`` [B, S]. A member of a context group has its part of them and of
``shift_labels``, the labels that its positions predict; the mask is whole."""


def count_label_tokens(batch: Batch) -> int:
    """Tokens that a causal loss counts: labels after the first position that are not -100."""
    return int(label_tokens(batch))


def label_tokens(batch: Batch) -> Tensor:
    """The same, as a tensor alongside the labels, so that nobody waits for it."""
    predicted = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    return (predicted != -100).sum()
