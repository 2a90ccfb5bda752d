"""A context group's parts of a micro-batch, and what its members put together again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.engine.parallel import functions, zigzag
from weft.engine.parallel.axis import AxisGroup
from weft.engine.stages.batch import Batch

CUT = ("input_ids", "labels", "position_ids")
"""Inputs of which a member has its own positions only."""
WHOLE = "whole."
"""Put before the names of what a loss of one's own is given: a micro-batch as it was before it was cut."""


def part_of(batch: Batch, group: AxisGroup, *, keep_whole: bool = False) -> dict[str, Tensor]:
    """This member's part of a micro-batch; its forwards need the packed rows (`tell_rows`).

    Args:
        batch: with ``position_ids``.
        keep_whole: also keep the whole, for an objective.

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
    """A micro-batch as it was before it was cut, out of one that was kept whole."""
    kept = {name.removeprefix(WHOLE): value for name, value in batch.items() if name.startswith(WHOLE)}
    return kept or dict(batch)


def whole_sequence(group: AxisGroup, part: Tensor) -> Tensor:
    """[B, S, ...] of all members' parts, on each of them; its gradient is summed over members and cut again."""
    return zigzag.in_order(group.size, functions.gather(group, part, 1), 1)


def own_positions(group: AxisGroup, whole: Tensor | None) -> Tensor | None:
    """A member's part of [B, S]; None of None."""
    return None if whole is None else zigzag.take(group, whole, -1)


def labels_to_predict(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the shifted labels for Hugging Face's loss, which cannot shift them where they are a part."""
    return {"shift_labels": batch["shift_labels"]} if "shift_labels" in batch else {}
