"""Packed rows of a micro-batch, which hold several sequences: known on the host, so that no forward waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import masking_utils

_KNOWN = "_weft_packed"
_SEQUENCES = "_weft_sequences"


def sequence_indices(position_ids: Tensor) -> Tensor:
    """Which sequence of its row each token [B, S] belongs to, counted from 0: positions go on by one inside it."""
    starts = position_ids[:, 1:] - position_ids[:, :-1] != 1
    return torch.nn.functional.pad(starts.cumsum(-1), (1, 0))


@dataclass(frozen=True)
class PackedRows:
    """The sequences in the rows of a micro-batch, the rows laid end to end.

    Attributes:
        bounds: int32 [N + 1], the first token of each of the N sequences, and the number of tokens at the end.
        longest: tokens of the longest sequence.
    """

    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, position_ids: Tensor) -> PackedRows | None:
        """Return the packed rows of ``position_ids`` [B, S] in host memory, or None if every row is one sequence."""
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1] != 1
        if not starts[:, 1:].any():
            return None
        ends = torch.tensor([position_ids.numel()], dtype=torch.int32)
        bounds = torch.cat([starts.flatten().nonzero().flatten().to(torch.int32), ends])
        return cls(bounds, int(bounds.diff().max()))

    def to(self, device: torch.device) -> PackedRows:
        """The same on ``device``."""
        return PackedRows(self.bounds.to(device, non_blocking=True), self.longest)


def tell_packed(position_ids: Tensor, rows: PackedRows | None, sequences: Tensor | None = None) -> None:
    """Let forwards that get this very tensor know.

    Args:
        sequences: [B, S], the `sequence_indices` of whole rows, where the positions are of parts of them.
    """
    setattr(position_ids, _KNOWN, rows or False)
    setattr(position_ids, _SEQUENCES, sequences)


def tell_rows(position_ids: Tensor, whole: Tensor) -> None:
    """Let forwards that get these positions know what the whole rows [B, S], in host memory, hold."""
    rows = PackedRows.of(whole)
    if rows is None:
        tell_packed(position_ids, None)
        return
    device, cut = position_ids.device, position_ids.shape != whole.shape
    sequences = sequence_indices(whole).to(device, non_blocking=True) if cut else None
    tell_packed(position_ids, rows.to(device), sequences)


def flash_arguments(position_ids: Tensor) -> dict[str, Tensor | int]:
    """Return the bounds that keep packed sequences apart in flash attention, for any number of rows, or empty without
    packing.

    By itself Hugging Face looks at positions of a single row only, and waits for the device to do so
    (`modeling_flash_attention_utils._is_packed_sequence`).
    """
    rows: PackedRows | None = getattr(position_ids, _KNOWN, None) or None
    if rows is None:
        return {}
    bounds, longest = rows.bounds, rows.longest
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _install() -> None:
    """Answer transformers' question from what was told.

    Its causal mask asks in every forward whether a row is packed, and waits for the device to say
    so (`masking_utils.find_packed_sequence_indices` of 5.17 to 5.19). A tensor of which nothing
    was told is looked at as before; one on the meta device, which holds nothing, is of one sequence.
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
