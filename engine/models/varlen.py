"""Attention over documents of packed rows, by names that a config's attention implementation may have."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import flash_attention_mask

from weft.engine.models.batch import flash_arguments

VARLEN = "varlen"
"""Name of attention by torch's `varlen_attn`, see `attend_documents`."""
ON_CPU = "weft_packed_rows"
"""Name of an attention that takes flash attention's arguments and no masks, for checks on small copies."""
REFUSED = ("softcap", "s_aux", "position_bias")
"""Arguments that change scores, which the kernel does not compute."""


def wanted_arguments(config: PreTrainedConfig, position_ids: Tensor) -> dict[str, Any]:
    """Return the additional arguments of a model's forward that flash attention needs, or none for other attention."""
    arguments = flash_arguments(position_ids)
    if not arguments:  # to read a config costs host time
        return {}
    name = str(config.get_text_config()._attn_implementation)
    return arguments if name.startswith((ON_CPU, VARLEN, "flash_attention")) else {}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each document, or within each row if no documents are given.

    Args:
        query: [B, heads, S, D].
        key, value: [B, key and value heads, S, D].
        cu_seq_lens_q: documents' bounds, see `flash_arguments`.
        window: number of tokens that a query attends to, with its own. None is no limit.

    Returns:
        The output [B, S, heads, D], and None instead of attention weights.
    """
    rows, heads, length, _ = query.shape
    if cu_seq_lens_q is None:
        bounds = range(0, rows * length + 1, length)
    else:
        bounds = cu_seq_lens_q.tolist()
    flat = [tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1) for tensor in (query, key, value)]  # [heads, B S, D]
    parts = [
        nn.functional.scaled_dot_product_attention(
            *(tensor[:, start:end] for tensor in flat), **_causal(end - start, window), scale=scaling, enable_gqa=True
        )
        for start, end in pairwise(bounds)
    ]
    joined = torch.cat(parts, dim=1).transpose(0, 1)
    return joined.reshape(rows, length, heads, -1), None


def _causal(length: int, window: int | None) -> dict[str, Any]:
    if window is None or window >= length:
        return {"is_causal": True}
    return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)}


def attend_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each document, on a GPU by `varlen_attn` and on a CPU by `attend`.

    A mask needs no attention. Its padding is at the end of rows, or each token of it is a document, because its
    positions do not continue those of the text.

    Args:
        query: [B, heads, S, D].
        key, value: [B, key and value heads, S, D].
        sliding_window: number of tokens that a query attends to, with its own. None is no limit.
        cu_seq_lens_q: int32 [N + 1], the documents' bounds in the concatenated rows. None: each row is one.
        max_length_q: length of the longest document.

    Returns:
        The output [B, S, heads, D], and None instead of attention weights.

    Raises:
        ValueError: the architecture changes scores in a way that the kernel does not compute.
    """
    odd = [name for name in REFUSED if more.get(name) is not None] + ["dropout"] * bool(dropout)
    if odd:
        raise ValueError(
            f"model.attn_implementation=varlen: {type(module).__name__} has {' and '.join(odd)}, which torch's "
            "varlen_attn does not compute; set it to sdpa or eager"
        )
    if query.device.type == "cpu":
        return attend(module, query, key, value, None, scaling, cu_seq_lens_q, sliding_window)
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, length, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    assert max_length_q is not None
    flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [B S, heads, D]
    bounds, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output = varlen_attn(*flat, *bounds, *longest, scale=scaling, window_size=window, enable_gqa=heads != key.shape[1])
    return output.view(rows, length, heads, -1), None


for name, function in ((ON_CPU, attend), (VARLEN, attend_documents)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, flash_attention_mask)
