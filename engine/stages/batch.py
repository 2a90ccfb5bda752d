"""A micro-batch as stages take it, and how many of its tokens a causal loss counts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Batch = Mapping[str, Tensor]
"""``input_ids``, ``labels`` (-100 = ignored, not shifted) and ``position_ids``, each int64 [B, S];
optionally ``attention_mask`` [B, S]."""


def count_label_tokens(batch: Batch) -> int:
    """Tokens that a causal loss counts: labels after the first position that are not -100."""
    return int(label_tokens(batch))


def label_tokens(batch: Batch) -> Tensor:
    """The same, as a tensor beside the labels, so that nobody waits for it."""
    return (batch["labels"][:, 1:] != -100).sum()
