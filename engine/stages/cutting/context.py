"""Division of a micro-batch over a context group, and gathering of its parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.engine.models.batch import Batch
from weft.engine.parallel import functions, zigzag
from weft.engine.parallel.axis import AxisGroup

CUT = ("input_ids", "labels", "position_ids")
"""Inputs that are divided by positions."""
WHOLE = "whole."
"""Prefix of the tensors of a whole micro-batch, which an objective receives."""


def part_of(batch: Batch, group: AxisGroup, *, keep_whole: bool = False) -> dict[str, Tensor]:
    """Return this member's part of a micro-batch. Its forwards also need the packed rows (`attach_rows_of`).

    Args:
        batch: with ``position_ids``.
        keep_whole: also keep the whole micro-batch, for an objective.

    Raises:
        ValueError: the sequences cannot be cut.
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
    """Return the whole micro-batch that `part_of` has kept."""
    kept = {name.removeprefix(WHOLE): value for name, value in batch.items() if name.startswith(WHOLE)}
    return kept or dict(batch)


def whole_sequence(group: AxisGroup, part: Tensor) -> Tensor:
    """Gather [B, S, ...] from all members' parts. The gradient is summed over members and divided again."""
    return zigzag.in_order(group.size, functions.gather(group, part, 1), 1)


def own_positions(group: AxisGroup, whole: Tensor | None) -> Tensor | None:
    """Return a member's part of [B, S], or None for None."""
    return None if whole is None else zigzag.take(group, whole, -1)


def labels_to_predict(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the shifted labels for Hugging Face's loss, which cannot shift a part of a sequence."""
    return {"shift_labels": batch["shift_labels"]} if "shift_labels" in batch else {}
