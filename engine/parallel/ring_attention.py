"""Ring attention as an implementation for Hugging Face's forward, with any mask.

Masks are made for one pair of chunks at a time, by Hugging Face's own mask functions. So windows, chunked attention,
packed documents and padding keep their meaning, and take memory for one step of the ring only.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)

from weft.engine.parallel.axis import AxisGroup, UnshareableError
from weft.engine.parallel.ring import Ring, Seen

_OF_SCORES = ("position_bias", "s_aux")
"""Arguments that change scores or their normalisation, which ring attention does not support."""


class RingAttention:
    """One member's attention and masks, for keys and values that are passed round the ring."""

    def __init__(self, group: AxisGroup, base: str) -> None:
        self._group, self._base = group, base
        self.name = f"weft_ring_{base}_{id(self)}"

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Seen | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention of this member's positions to all positions.

        Args:
            query: this member's queries, [B, heads, S / members, D].
            key, value: [B, key and value heads, S / members, D].
            attention_mask: from `mask`.

        Returns:
            The output [B, S / members, heads, D], and None instead of attention weights.

        Raises:
            UnshareableError: attention block by block does not support an argument of the module.
        """
        self._require(dropout == 0.0, module, "drops weights of its attention (set its attention_dropout to 0)")
        given = [name for name in _OF_SCORES if arguments.get(name) is not None]
        self._require(not given, module, f"gives its attention {' and '.join(given)}")
        own = attention_mask is None or isinstance(attention_mask, Seen)
        self._require(own and key.shape[2] == query.shape[2], module, "makes keys or masks of its own")
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            self._require(causal, module, "attends to later positions")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = Ring(self._group, scale, attention_mask).attend(query, key, value)
        return output.transpose(1, 2).contiguous(), None

    def mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor] = causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        device: torch.device | str = "cpu",
        **arguments: Any,
    ) -> Seen | None:
        """Return the mask, or None if it is plain causal.

        Args:
            mask_function: takes the indices of batch, head, query and key in the whole sequence.
            attention_mask: [B, S] of the whole sequence, false where a token is padding.
            local_size: number of positions in an attention window. None means no window.
        """
        length = q_length * self._group.size
        reaches = local_size is None or length < local_size
        if allow_is_causal_skip and attention_mask is None and reaches:
            return None
        padding = prepare_padding_mask(attention_mask, length, 0)
        seen = mask_function if padding is None else and_masks(mask_function, padding_mask_function(padding))

        def of(rows: Tensor, columns: Tensor) -> Tensor:
            def of_places(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
                return seen(batch, head, rows[row], columns[column])

            given = arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            return AttentionMaskInterface()[self._base](
                q_length=rows.numel(), kv_length=columns.numel(), mask_function=of_places, device=device, **given
            )

        return Seen(of, only_earlier(seen), local_size)

    def _require(self, met: bool, module: nn.Module, what: str) -> None:
        if not met:
            raise UnshareableError(
                f"parallel.context_exchange=ring: {type(module).__name__} {what}, which attention cannot have that is "
                "computed block by block; set parallel.context_exchange=gather"
            )


def only_earlier(function: Callable[..., Tensor]) -> bool:
    """True if a transformers mask function hides all later positions.

    It does if it is the causal mask, or combines the causal mask with others by "and". For any other function the
    result is False, and later chunks are computed and masked.
    """
    if function is causal_mask_function:
        return True
    if getattr(function, "__qualname__", "") != f"{and_masks.__qualname__}.<locals>.and_mask":
        return False
    return any(map(only_earlier, getclosurevars(function).nonlocals.get("mask_functions", ())))
