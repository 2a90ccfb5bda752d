"""Context-parallel attention: a sequence is divided over the members of a context group.

Hugging Face's forward looks up its attention and mask functions by a name in the config. Each member registers its
own functions under a unique name. `ContextAttention`, `HeadAttention` and `RingAttention` are the exchanges. Hugging
Face's own mask functions make the mask rows of this member's positions, so that windows, chunks, packed documents and
padding keep their meaning.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function, prepare_padding_mask

from weft.conf.schema import ContextExchange
from weft.engine.parallel import functions, zigzag
from weft.engine.parallel.axis import AxisGroup, AxisGroups, UnshareableError
from weft.engine.parallel.context_exchange import MASKED, ring_obstacle
from weft.engine.parallel.ring import Ring, Seen

_OF_POSITIONS = ("position_ids",)
"""Arguments about this member's positions.

They are not passed on, because flash attention receives documents' bounds.
"""
_OF_HEADS = ("position_bias", "s_aux")
"""Arguments with one entry for each head."""
_OF_SCORES = ("position_bias", "s_aux")
"""Arguments that change scores or their normalisation, which ring attention does not support."""


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


class MemberAttention(ABC):
    """Attention and masks of one member of a context group, which divides the sequence between its members.

    Attributes:
        name: under which Hugging Face's forward finds both functions.
    """

    prefix = "weft_{base}"

    def __init__(self, group: AxisGroup, base: str) -> None:
        """Create the functions of a member; ``base`` is the configured attention."""
        self._group, self._base = group, base
        self.name = f"{self.prefix.format(base=base)}_{id(self)}"

    @abstractmethod
    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention of this member's positions to the whole sequence.

        Args:
            query: this member's queries, [B, heads, S / members, D].
            key, value: [B, key and value heads, S / members, D].
            attention_mask: from `mask`.

        Returns:
            The output [B, S / members, heads, D], and the attention weights or None.

        Raises:
            UnshareableError: the exchange does not support an argument of the module.
        """

    @abstractmethod
    def mask(self, *, q_length: int, kv_length: int, **arguments: Any) -> Any:
        """Return the mask for `attend`, or None if it is plain causal. See `transformers.AttentionMaskInterface`.

        Args:
            q_length: number of this member's positions.
            kv_length: ignored, because the exchange provides the keys of the whole sequence.
            mask_function: takes the indices of batch, head, query and key in the whole sequence.
            attention_mask: [B, S] of the whole sequence, false where a token is padding.
            local_size: number of positions in an attention window. None means no window.
        """

    def _is_plain(self, length: int, attention_mask: Tensor | None, local_size: int | None) -> bool:
        """True if a sequence of ``length`` has neither padding nor a window."""
        return attention_mask is None and (local_size is None or length < local_size)

    def _visible(self, function: Callable[..., Tensor], rows: Tensor, columns: Tensor, **arguments: Any) -> Tensor:
        """Return the configured attention's mask for query positions ``rows`` and key positions ``columns``."""

        def at(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return function(batch, head, rows[row], columns[column])

        return AttentionMaskInterface()[self._base](
            q_length=rows.numel(),
            kv_length=columns.numel(),
            mask_function=at,
            allow_is_causal_skip=False,
            device=rows.device,
            **arguments,
        )


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


class ContextAttention(MemberAttention):
    """The configured attention of one member's queries, with keys and values that are gathered."""

    prefix = "weft_context_{base}"

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See `MemberAttention.attend`."""
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
        """See `MemberAttention.mask`."""
        length = q_length * self._group.size
        if self._base == "sdpa" and allow_is_causal_skip and self._is_plain(length, attention_mask, local_size):
            return None
        rows = zigzag.positions(self._group, length, device)
        columns = torch.arange(length, device=device)
        return self._visible(mask_function, rows, columns, attention_mask=attention_mask, **arguments)

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
        if position_bias is not None or not _is_causal(module, is_causal):
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


class HeadAttention(MemberAttention):
    """Attention and masks of one member, for whole sequences and a part of the heads ("DeepSpeed Ulysses").

    One all-to-all sends queries, keys and values to the members that have their heads, and another one returns the
    outputs. In between the configured attention runs on whole sequences. So windows, packed documents and padding work
    as usual, and flash attention needs no mask.
    """

    prefix = "{base}_weft_heads"  # transformers passes varlen arguments to names with this prefix

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """See `MemberAttention.attend`."""
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
        """See `MemberAttention.mask`."""
        length = q_length * self._group.size
        return AttentionMaskInterface()[self._base](q_length=length, kv_length=length, **arguments)

    def _to_heads(self, *parts: Tensor) -> list[Tensor]:
        """Exchange tensors [B, heads, S / members, D] for [B, heads / members, S, D], in one all-to-all."""
        size = self._group.size
        rows = [part.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4) for part in parts]
        widths = [row.shape[-2:] for row in rows]
        joined = self._exchange(torch.cat([row.flatten(3).flatten(0, 1) for row in rows], -1))
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


class RingAttention(MemberAttention):
    """Attention and masks of one member, for keys and values that are passed round the ring.

    Masks are made for one pair of chunks at a time, by Hugging Face's own mask functions. So windows, chunked
    attention, packed documents and padding keep their meaning, and take memory for one step of the ring only.
    """

    prefix = "weft_ring_{base}"

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
        """See `MemberAttention.attend`."""
        self._require(dropout == 0.0, module, "drops weights of its attention (set its attention_dropout to 0)")
        given = [name for name in _OF_SCORES if arguments.get(name) is not None]
        self._require(not given, module, f"gives its attention {' and '.join(given)}")
        own = attention_mask is None or isinstance(attention_mask, Seen)
        self._require(own and key.shape[2] == query.shape[2], module, "makes keys or masks of its own")
        if attention_mask is None:
            self._require(_is_causal(module, is_causal), module, "attends to later positions")
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
        """See `MemberAttention.mask`."""
        length = q_length * self._group.size
        if allow_is_causal_skip and self._is_plain(length, attention_mask, local_size):
            return None
        padding = prepare_padding_mask(attention_mask, length, 0)
        seen = mask_function if padding is None else and_masks(mask_function, padding_mask_function(padding))

        def of(rows: Tensor, columns: Tensor) -> Tensor:
            return self._visible(seen, rows, columns, allow_is_bidirectional_skip=False, **arguments)

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


_MAKES: dict[ContextExchange, type[MemberAttention]] = {
    ContextExchange.gather: ContextAttention,
    ContextExchange.all_to_all: HeadAttention,
    ContextExchange.ring: RingAttention,
}
