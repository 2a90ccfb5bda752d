"""How many tokens of a micro-batch a causal loss counts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def count_label_tokens(batch: Mapping[str, Tensor]) -> int:
    """Tokens that a causal loss counts: labels after the first position that are not -100."""
    return int(label_tokens(batch))


def label_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """The same, as a tensor beside the labels, so that nobody waits for it."""
    return (batch["labels"][:, 1:] != -100).sum()
