"""The form of a stage's micro-batch, and the number of its tokens in a causal loss."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Batch = Mapping[str, Tensor]
"""``input_ids``, ``labels`` (-100 = ignored, not shifted) and ``position_ids``, each int64 [B, S], and optionally
``attention_mask`` [B, S]. A member of a context group has its part of these tensors and of ``shift_labels``, the
labels that its positions predict, but the whole mask."""


def count_label_tokens(batch: Batch) -> int:
    """Return the number of tokens in a causal loss: labels after the first position that are not -100."""
    return int(label_tokens(batch))


def label_tokens(batch: Batch) -> Tensor:
    """Return the same number as a tensor on the labels' device, without synchronisation."""
    predicted = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    return (predicted != -100).sum()
