"""Attention over a sequence that is divided over the members of a context group.

Hugging Face's forward looks up its attention and mask functions by a name in the config. Each member registers its
own functions under a unique name. Here they gather keys and values, and run the configured attention with this
member's queries. `HeadAttention` and `RingAttention` are the alternatives. Hugging Face's own mask functions make the
mask rows of this member's positions, so that windows, chunks, packed documents and padding keep their meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.masking_utils import causal_mask_function

from weft.conf.schema import ContextExchange
from weft.engine.parallel import functions, zigzag
from weft.engine.parallel.axis import AxisGroup, AxisGroups, UnshareableError
from weft.engine.parallel.context_exchange import MASKED, ring_obstacle
from weft.engine.parallel.head_attention import HeadAttention
from weft.engine.parallel.ring_attention import RingAttention


def attend_over(axes: AxisGroups, model: PreTrainedModel) -> None:
    """Replace a model's attention, so that it attends to the keys and values of all members of the context group.

    The members' parts of the sequence are zigzag.

    Raises:
        UnshareableError: the configured attention does not support the exchange, or the model does not look up its
            attention by name.
    """
    group = axes.context
    if group.size == 1:
        return
    base = model.config.get_text_config()._attn_implementation
    if axes.exchange is ContextExchange.gather and base not in MASKED:
        raise UnshareableError(
            f"model.attn_implementation={base}: where parallel.context={group.size} members gather keys and values, "
            f"attention has to take masks of any form; choose {' or '.join(MASKED)}, or a context that divides heads"
        )
    if axes.exchange is ContextExchange.ring and (obstacle := ring_obstacle(model.config, base)):
        raise UnshareableError(f"parallel.context_exchange=ring: {obstacle}")
    member = _MAKES[axes.exchange](group, base)
    AttentionInterface.register(member.name, member.attend)
    AttentionMaskInterface.register(member.name, member.mask)
    model.set_attn_implementation(member.name)
    if model.config.get_text_config()._attn_implementation != member.name:
        raise UnshareableError(
            f"parallel.context={group.size}: {type(model).__name__} does not look up its attention by name, so it "
            "cannot attend to what other ranks hold; set parallel.context=1, or choose another architecture"
        )


class ContextAttention:
    """One member's attention and masks, for gathered keys and values."""

    def __init__(self, group: AxisGroup, base: str) -> None:
        self._group = group
        self._base = base
        self.name = f"weft_context_{base}_{id(self)}"

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention of this member's positions to all positions.

        Args:
            query: this member's queries, [B, heads, S / members, D].
            key, value: [B, key and value heads, S / members, D].
            attention_mask: from `mask`.

        Returns:
            The output [B, S / members, heads, D], and the attention weights if the configured attention returns them.
        """
        key, value = self._whole(key, value)
        if attention_mask is None and self._base == "sdpa":
            return self._causal(module, query, key, value, **arguments), None
        return self._configured(module)(module, query, key, value, attention_mask, **arguments)

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
    ) -> Tensor | None:
        """Return the mask [B, 1, S / members, S] of this member's queries.

        Return None if torch's scaled-dot-product attention can use a plain causal mask instead.

        Args:
            q_length: number of this member's positions.
            kv_length: ignored. Keys of the whole sequence are gathered.
            mask_function: takes the indices of batch, head, query and key in the whole sequence.
            attention_mask: [B, S] of the whole sequence, false where a token is padding.
            local_size: number of positions in an attention window. None means no window.
        """
        length = q_length * self._group.size
        reaches = local_size is None or length < local_size
        if self._base == "sdpa" and allow_is_causal_skip and attention_mask is None and reaches:
            return None
        rows = zigzag.positions(self._group, length, device)

        def of_row(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return mask_function(batch, head, rows[row], column)

        return AttentionMaskInterface()[self._base](
            q_length=q_length,
            kv_length=length,
            mask_function=of_row,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            device=device,
            **arguments,
        )

    def _whole(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of the whole sequence in one all-gather."""
        both = torch.cat((key, value), -1).permute(2, 0, 1, 3)  # members' parts become contiguous
        gathered = zigzag.in_order(self._group.size, functions.gather(self._group, both, 0), 0).permute(1, 2, 0, 3)
        key, value = gathered.split((key.shape[-1], value.shape[-1]), -1)
        return key, value

    def _causal(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute causal attention of this member's two chunks, each only to the keys up to the chunk's end."""
        if position_bias is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise UnshareableError(
                f"parallel.context={self._group.size}: {type(module).__name__} adds biases of its own to scores, or "
                "attends to later positions, which gathered keys and values do not allow for; set parallel.context=1, "
                "or choose another architecture"
            )
        groups = query.shape[1] // key.shape[1]
        grouped = groups > 1 and use_gqa_in_sdpa(None, key, value)
        if groups > 1 and not grouped:
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        chunk = query.shape[2] // 2
        outputs = []
        for part, number in zip(query.chunk(2, 2), zigzag.chunks_of(self._group.size, self._group.index), strict=True):
            end = (number + 1) * chunk
            before = key[:, :, :end], value[:, :, :end]
            causal = {"is_causal": True} if number == 0 else {"attn_mask": causal_lower_right(chunk, end)}
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    part, *before, dropout_p=dropout, scale=scaling, enable_gqa=grouped, **causal
                )
            )
        return torch.cat(outputs, 2).transpose(1, 2).contiguous()

    def _configured(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        if self._base == "eager":  # each model's module has its own
            return sys.modules[type(module).__module__].eager_attention_forward
        return AttentionInterface()[self._base]


_MAKES: dict[ContextExchange, Callable[[AxisGroup, str], ContextAttention | HeadAttention | RingAttention]] = {
    ContextExchange.gather: ContextAttention,
    ContextExchange.all_to_all: HeadAttention,
    ContextExchange.ring: RingAttention,
}
