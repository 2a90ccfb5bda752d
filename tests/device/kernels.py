"""Kernels that a GPU has and a CPU lacks, by operators of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
kernels = torch.library.Library("aten", "IMPL", "CUDA")
SUMS_MULTIPLE = 32
"""Memory-efficient attention pads the queries' log-sum-exp to a multiple."""


def _dropout(values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    kept = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p if train is not False else 1.0)
    return values * kept * (1 / (1 - p) if train is not False else 1.0), kept


def _flash(
    query: Tensor, key: Tensor, value: Tensor, p: float = 0.0, causal: bool = False, mask: bool = False, **named: Any
) -> tuple[Any, ...]:
    assert not p, "no kernel with dropout"
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value))
    output, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, p, causal, **named)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    return output, sums, None, None, query.shape[2], key.shape[2], seed, torch.empty_like(seed), unused


def _flash_backward(*args: Any, **named: Any) -> tuple[Tensor, ...]:
    gradient, query, *shared, output, sums, _, _, _, _, p, causal, _, _ = args
    groups = query.shape[1] // shared[0].shape[1]
    repeated = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in shared)
    tensors = gradient, query, *repeated, output, sums
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, p, causal, **named)
    return found[0], *(tensor.unflatten(1, (-1, groups)).sum(2) if groups > 1 else tensor for tensor in found[1:])


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, sums: bool, p: float = 0.0, causal: bool = False, **named: Any
) -> tuple[Tensor, ...]:
    output, found, *_, seed, offset, _ = _flash(query, key, value, p, causal, attn_mask=bias, **named)
    return output, pad(found, (0, -found.shape[-1] % SUMS_MULTIPLE), value=torch.inf), seed, offset


def _efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    output: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    p: float,
    mask: Any,
    causal: bool = False,
    **named: Any,
) -> tuple[Tensor | None, ...]:
    tensors = gradient, query, key, value, output, sums[..., : query.shape[2]]
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, p, causal, attn_mask=bias, **named)
    return *found, None


def _of_documents(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, causal: bool, left: Any, right: Any
) -> Any:
    """Return [1, heads, T, D] of concatenated documents' tensors [T, heads, D], and which tokens see each other."""
    at = torch.arange(len(query), device=query.device)
    document = torch.bucketize(at, bounds.long(), right=True)
    distance = at[:, None] - at
    seen = document[:, None] == document
    if causal or right == 0:
        seen &= distance >= 0
    if left is not None and left >= 0:
        seen &= distance <= left
    groups = query.shape[1] // key.shape[1]
    wide = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, -torch.inf)
    return [tensor.transpose(0, 1)[None] for tensor in wide], mask


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, _: Any, *args: Any, **named: Any) -> Any:
    causal, window = args[3], (named.get("window_size_left"), named.get("window_size_right"))
    tensors, mask = _of_documents(query, key, value, bounds, causal, *window)
    output, sums, *_, seed, unused, debug = _flash(*tensors, attn_mask=mask, scale=named.get("scale"))
    return output[0].transpose(0, 1).contiguous(), sums[0], seed, unused, debug


def _varlen_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
    output, sums, bounds, *_, causal, _, _ = args
    window = named.get("window_size_left"), named.get("window_size_right")
    tensors, mask = _of_documents(query, key, value, bounds, causal, *window)
    whole = (gradient.transpose(0, 1)[None], *tensors, output.transpose(0, 1)[None], sums[None])
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *whole, 0.0, False, attn_mask=mask, scale=named.get("scale")
    )
    # Query heads that share a key's head add up.
    return tuple(
        of[0].transpose(0, 1).unflatten(1, (like.shape[1], -1)).sum(2)
        for of, like in zip(found, (query, key, value), strict=True)
    )


for name, kernel in {
    "_flash_attention_forward": _varlen,
    "_flash_attention_backward": _varlen_backward,
    "native_dropout": _dropout,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}.items():
    kernels.impl(name, kernel)
