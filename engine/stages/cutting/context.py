"""Division of a micro-batch over a context group, and gathering of its parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.engine.models.batch import Batch
from weft.engine.parallel import functions, zigzag
from weft.engine.parallel.axis import AxisGroup

CUT = ("input_ids", "labels", "position_ids", "token_type_ids")
"""Inputs whose positions are divided over the group."""
WHOLE = "whole."
"""Prefix under which a part also keeps the tensors of the whole micro-batch. Objectives read them."""


def part_of(batch: Batch, group: AxisGroup, *, keep_whole: bool = False) -> dict[str, Tensor]:
    """Return this member's part of a micro-batch. Its forward also needs `attach_rows_of`.

    Args:
        batch: the whole micro-batch, with ``position_ids``.
        keep_whole: also keep the whole micro-batch, which an objective reads.

    Raises:
        ValueError: the group cannot divide the sequence length.
    """
    if group.size == 1:
        return dict(batch)
    part = {name: zigzag.take(group, value, -1) if name in CUT else value for name, value in batch.items()}
    following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    part["shift_labels"] = zigzag.take(group, following, -1)
    if keep_whole:
        part |= {WHOLE + name: value for name, value in batch.items()}
    return part


def whole_batch(batch: Batch) -> dict[str, Tensor]:
    """Return the whole micro-batch that `part_of` kept, or ``batch`` itself if it kept none."""
    kept = {name.removeprefix(WHOLE): value for name, value in batch.items() if name.startswith(WHOLE)}
    return kept or dict(batch)


def whole_sequence(group: AxisGroup, part: Tensor) -> Tensor:
    """Gather [B, S, ...] from all members' parts. The backward sums the gradient over members and divides it again."""
    return zigzag.in_order(group.size, functions.gather(group, part, 1), 1)


def own_positions(group: AxisGroup, whole: Tensor | None) -> Tensor | None:
    """Return this member's positions of ``whole``, [B, S], or None if ``whole`` is None."""
    return None if whole is None else zigzag.take(group, whole, -1)


def labels_to_predict(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a part's shifted labels for Hugging Face's loss, which cannot shift them. Empty for a whole batch."""
    return {"shift_labels": batch["shift_labels"]} if "shift_labels" in batch else {}
