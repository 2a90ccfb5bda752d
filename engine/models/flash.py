"""Arguments of flash attention for packed rows, and a stand-in that checks that architectures pass them on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import flash_attention_mask

from weft.engine.models.batch import flash_arguments

ON_CPU = "weft_packed_rows"
"""Name of an attention that takes flash attention's arguments and no masks, for checks on small copies."""


def wanted_arguments(config: PreTrainedConfig, position_ids: Tensor) -> dict[str, Any]:
    """Return the additional arguments of a model's forward that flash attention needs, or none for other attention."""
    name = str(config.get_text_config()._attn_implementation)
    return flash_arguments(position_ids) if name.startswith((ON_CPU, "flash_attention")) else {}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each document, or within each row if no documents are given.

    Args:
        query: [B, heads, S, D].
        key, value: [B, key and value heads, S, D].
        cu_seq_lens_q: documents' bounds, see `flash_arguments`.

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
            *(tensor[:, start:end] for tensor in flat), is_causal=True, scale=scaling, enable_gqa=True
        )
        for start, end in pairwise(bounds)
    ]
    joined = torch.cat(parts, dim=1).transpose(0, 1)
    return joined.reshape(rows, length, heads, -1), None


AttentionInterface.register(ON_CPU, attend)
AttentionMaskInterface.register(ON_CPU, flash_attention_mask)
