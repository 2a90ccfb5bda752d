"""Whether rows of a micro-batch hold several sequences: told by the host, so that no forward asks the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import masking_utils

_KNOWN = "_weft_packed"


def sequence_indices(position_ids: Tensor) -> Tensor:
    """Which sequence of its row each token [B, S] belongs to, counted from 0: positions go on by one inside it."""
    starts = position_ids[:, 1:] - position_ids[:, :-1] != 1
    return torch.nn.functional.pad(starts.cumsum(-1), (1, 0))


def is_packed(position_ids: Tensor) -> bool:
    """Whether any row holds more than one sequence; ``position_ids`` [B, S] in host memory."""
    return bool((position_ids[:, 1:] - position_ids[:, :-1] != 1).any())


def tell_packed(position_ids: Tensor, packed: bool) -> None:
    """Let forwards that get this very tensor know."""
    setattr(position_ids, _KNOWN, packed)


def _install() -> None:
    """Answer transformers' question from what was told.

    Its causal mask asks in every forward whether a row is packed, and waits for the device to say
    so (`masking_utils.find_packed_sequence_indices` of 5.17 to 5.19). A tensor of which nothing
    was told is looked at as before; one on the meta device, which holds nothing, is of one sequence.
    """
    look: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        packed = getattr(position_ids, _KNOWN, None)
        if packed is None and not position_ids.is_meta:
            return look(position_ids)
        return sequence_indices(position_ids) if packed else None

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


if hasattr(masking_utils, "find_packed_sequence_indices"):
    _install()
