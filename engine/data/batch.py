"""Micro-batches: rows of token ids, labels and positions, as Hugging Face models take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.engine.data.documents import IGNORED, Document

Batch = dict[str, Tensor]
"""One micro-batch of B sequences of S tokens on the CPU.

``input_ids``, ``labels`` (-100 is ignored, not shifted, because the model shifts them) and
``position_ids`` are int64 of shape [B, S]. ``attention_mask`` (1 for tokens, 0 for padding) is
present only without packing, if rows are padded.
"""


def collate(rows: Sequence[Sequence[Document]], sequence_length: int, pad: int, *, packing: bool) -> Batch:
    """Concatenate the pieces of each row into tensors.

    The positions of each piece start at 0 and its first label is ignored, so that no loss and (with
    Hugging Face's packed attention) no attention crosses into another document. With packing, the
    rest of a row is one more document of padding. Without packing, it is masked.
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
