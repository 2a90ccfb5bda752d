"""Micro-batches as models take them: positions, documents, and the arguments of flash attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

Batch = Mapping[str, Tensor]
"""Tensors of a micro-batch: int64 [B, S] ``input_ids``, ``labels`` and ``position_ids``.

Labels are not shifted, and -100 is ignored. ``attention_mask`` [B, S] is optional. A member of a context group has its
part of these tensors, but the whole mask. It also has its part of ``shift_labels``, the labels that its positions
predict.
"""


def count_label_tokens(batch: Batch) -> int:
    """Return the number of tokens in a causal loss: labels after the first position that are not -100."""
    return int(label_tokens(batch))


def label_tokens(batch: Batch) -> Tensor:
    """Return the number of `count_label_tokens` as a tensor on the labels' device, without synchronisation."""
    predicted = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    return (predicted != -100).sum()


def default_positions(batch: Batch, model: PreTrainedModel | None) -> Tensor:
    """Return the positions that a model's own forward gives a micro-batch without ``position_ids``, [B, S]."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if model is not None and (count := counts_from_padding(type(model).__module__)) is not None:
        return count(ids, model.config.pad_token_id)
    if model is not None and model.config.model_type == "opt" and mask is not None:
        return mask.long().cumsum(-1) * mask.long() - 1
    return torch.arange(ids.shape[-1], device=ids.device).repeat(len(ids), 1)


@cache
def counts_from_padding(module: str) -> Callable[[Tensor, int], Tensor] | None:
    """Return a function of ids and padding token if positions of a module's models begin behind it, as in RoBERTa."""
    kinds = vars(sys.modules[module]).values()
    return next((found for kind in kinds if (found := getattr(kind, _COUNTING, None)) is not None), None)


_COUNTING = "create_position_ids_from_input_ids"
_KNOWN = "_weft_packed"
_SEQUENCES = "_weft_sequences"


def sequence_indices(position_ids: Tensor) -> Tensor:
    """Return the index of each token's document in its row, [B, S]. Positions are consecutive within a document."""
    starts = position_ids[:, 1:] - position_ids[:, :-1] != 1
    return torch.nn.functional.pad(starts.cumsum(-1), (1, 0))


@dataclass(frozen=True)
class PackedRows:
    """Bounds of the documents in the concatenated rows of a micro-batch.

    Attributes:
        bounds: int32 [N + 1], the index of the first token of each of the N documents, then the number of tokens.
        longest: length of the longest document.
    """

    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, position_ids: Tensor) -> PackedRows | None:
        """Find the documents by ``position_ids`` [B, S] in host memory. Return None if every row is one document."""
        jumps = position_ids[:, 1:] - position_ids[:, :-1] != 1
        if not jumps.any():
            return None
        starts = torch.nn.functional.pad(jumps, (1, 0), value=True)
        ends = torch.tensor([position_ids.numel()], dtype=torch.int32)
        bounds = torch.cat([starts.flatten().nonzero().flatten().to(torch.int32), ends])
        return cls(bounds, int(bounds.diff().max()))

    def to(self, device: torch.device) -> PackedRows:
        """Return a copy on ``device``."""
        return PackedRows(self.bounds.to(device, non_blocking=True), self.longest)


def attach_packed_rows(position_ids: Tensor, rows: PackedRows | None, sequences: Tensor | None = None) -> None:
    """Attach documents' bounds to a tensor of positions, for forwards that receive this tensor object.

    Args:
        rows: the bounds, or None if every row is one document.
        sequences: `sequence_indices` of the whole rows, [B, S], if the positions are only a part of them.
    """
    setattr(position_ids, _KNOWN, rows or False)
    setattr(position_ids, _SEQUENCES, sequences)


def attach_rows_of(position_ids: Tensor, whole: Tensor) -> None:
    """Attach to a tensor of positions the bounds of the documents in ``whole``, the whole rows' positions.

    ``whole`` [B, S] is in host memory.
    """
    rows = PackedRows.of(whole)
    if rows is None:
        attach_packed_rows(position_ids, None)
        return
    device, cut = position_ids.device, position_ids.shape != whole.shape
    sequences = sequence_indices(whole).to(device, non_blocking=True) if cut else None
    attach_packed_rows(position_ids, rows.to(device), sequences)


def flash_arguments(position_ids: Tensor) -> dict[str, Tensor | int]:
    """Return arguments that separate packed documents in flash attention, for any number of rows.

    Return an empty dictionary if nothing is packed. Hugging Face itself detects packing only in a single row, and
    synchronises the device for it (`modeling_flash_attention_utils._is_packed_sequence`).
    """
    rows: PackedRows | None = getattr(position_ids, _KNOWN, None) or None
    if rows is None:
        return {}
    bounds, longest = rows.bounds, rows.longest
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _install() -> None:
    """Make transformers use the attached bounds instead of detecting packed rows itself.

    Its causal mask detects packing in every forward, and synchronises the device for it
    (`masking_utils.find_packed_sequence_indices` of 5.17 to 5.19). Tensors without attached bounds are examined as
    before. On the meta device, which has no values, a row counts as one document.
    """
    look: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        rows = getattr(position_ids, _KNOWN, None)
        if rows is None and not position_ids.is_meta:
            return look(position_ids)
        if not rows:
            return None
        whole = getattr(position_ids, _SEQUENCES, None)
        return sequence_indices(position_ids) if whole is None else whole

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


if hasattr(masking_utils, "find_packed_sequence_indices"):
    _install()
