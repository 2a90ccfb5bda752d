"""Micro-batches: sequences of token ids, labels and positions, in the form that Hugging Face models take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.engine.data.documents import IGNORED, Document

Batch = dict[str, Tensor]
"""A micro-batch of B sequences of S tokens on the CPU.

``input_ids``, ``labels`` and ``position_ids`` are int64 [B, S]. A label of -100 is ignored. Labels are not shifted,
because the model shifts them. ``attention_mask`` (1 for tokens, 0 for padding) is present only if a sequence is padded
without packing.
"""


def collate(rows: Sequence[Sequence[Document]], sequence_length: int, pad: int, *, packing: bool) -> Batch:
    """Concatenate the pieces of documents in each sequence, and return them as a micro-batch.

    The positions of each piece start at 0, and its first label is ignored. So no loss and (with Hugging Face's packed
    attention) no attention crosses into another document. With packing, the rest of a sequence is a further document of
    padding. Without packing, the rest is masked.
    """
    shape = (len(rows), sequence_length)
    ids = np.full(shape, pad, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.empty(shape, dtype=np.int64)
    mask = np.ones(shape, dtype=np.int64)
    for row, pieces in enumerate(rows):
        at = 0
        for piece in pieces:
            end = at + len(piece.ids)
            ids[row, at:end] = piece.ids
            labels[row, at + 1 : end] = piece.labels[1:]
            positions[row, at:end] = np.arange(end - at)
            at = end
        padded_from = at if packing else 0
        positions[row, padded_from:] = np.arange(sequence_length - padded_from)
        if at:  # a row without documents attends to its padding, because a softmax over nothing is NaN
            mask[row, at:] = 0
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    if not packing and not mask.all():
        batch["attention_mask"] = mask
    return {name: torch.from_numpy(values) for name, values in batch.items()}
