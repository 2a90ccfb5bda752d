"""Attention of whole sequences with the heads divided over a context group ("DeepSpeed Ulysses").

One all-to-all sends queries, keys and values to the members that have their heads, and another one returns the
outputs. In between the configured attention runs on whole sequences. So windows, packed documents and padding work as
usual, and flash attention needs no mask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn
from transformers import AttentionInterface, AttentionMaskInterface

from weft.engine.parallel import functions, zigzag
from weft.engine.parallel.axis import AxisGroup

_OF_POSITIONS = ("position_ids",)
"""Arguments about this member's positions.

They are not passed on, because flash attention receives documents' bounds.
"""
_OF_HEADS = ("position_bias", "s_aux")
"""Arguments with one entry for each head."""


class HeadAttention:
    """One member's attention and masks, for whole sequences and a part of the heads."""

    def __init__(self, group: AxisGroup, base: str) -> None:
        self._group, self._base = group, base
        self.name = f"{base}_weft_heads_{id(self)}"  # transformers passes varlen arguments to names with this prefix

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention of this member's positions to the whole sequence, for all heads.

        Args:
            query: this member's queries, [B, heads, S / members, D].
            key, value: [B, key and value heads, S / members, D].
            attention_mask: from `mask`, for whole sequences.

        Returns:
            The output [B, S / members, heads, D], and None instead of attention weights.

        Raises:
            ValueError: the attention has an argument with one entry for each head.
        """
        if any(arguments.get(name) is not None for name in _OF_HEADS):
            raise ValueError(
                f"{type(module).__name__} gives its attention something for each head; set "
                "parallel.context_exchange=gather"
            )
        given = {name: value for name, value in arguments.items() if name not in _OF_POSITIONS}
        whole = self._to_heads(query, key, value)
        output, _ = AttentionInterface()[self._base](module, *whole, attention_mask, **given)
        return self._to_positions(output), None

    def mask(self, *, q_length: int, kv_length: int, **arguments: Any) -> Tensor | None:
        """Return the mask of whole sequences in the form of the configured attention."""
        length = q_length * self._group.size
        return AttentionMaskInterface()[self._base](q_length=length, kv_length=length, **arguments)

    def _to_heads(self, *parts: Tensor) -> list[Tensor]:
        """Exchange tensors [B, heads, S / members, D] for [B, heads / members, S, D], in one all-to-all."""
        size = self._group.size
        rows = [part.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4) for part in parts]
        widths = [row.shape[-2:] for row in rows]
        joined = self._exchange(cat([row.flatten(3).flatten(0, 1) for row in rows], -1))
        whole = zigzag.in_order(size, joined, 0).split([width.numel() for width in widths], -1)
        return [part.unflatten(-1, width).permute(1, 2, 0, 3) for part, width in zip(whole, widths, strict=True)]

    def _to_positions(self, output: Tensor) -> Tensor:
        """Exchange [B, S, heads / members, D] for [B, S / members, heads, D], in one all-to-all."""
        size, width = self._group.size, output.shape[2:]
        rows = zigzag.by_member(size, output.transpose(0, 1).flatten(2), 0)
        of_heads = self._exchange(rows).unflatten(0, (size, -1)).unflatten(-1, width)
        return of_heads.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _exchange(self, rows: Tensor) -> Tensor:
        each = [rows.shape[0] // self._group.size] * self._group.size
        return functions.exchange(self._group, rows, each, each)
