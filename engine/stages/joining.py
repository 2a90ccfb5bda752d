"""Packing of several tensors into one, bit for bit, so that stages exchange a single message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Parts = Sequence[tuple[Sequence[int], torch.dtype]]
"""Shapes and types of tensors."""
ALIGNMENT = 16
"""Alignment of each part in bytes."""


def packed_size(parts: Parts, dtype: torch.dtype) -> int:
    """Return the number of elements of ``dtype`` of the packed tensor."""
    return sum(_room(shape, kind) for shape, kind in parts) // dtype.itemsize


def pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Pack tensors, bit for bit, into one of [elements]. Its gradient contains their gradients."""
    return _Pack.apply(dtype, *tensors)


def unpack(packed: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    """Unpack the tensors."""
    return _Unpack.apply(packed, parts)


def _room(shape: Sequence[int], dtype: torch.dtype) -> int:
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.parts = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return _join(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = _part(gradient, ctx.parts)
        return None, *(part if part.is_floating_point() else None for part in found)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, parts: Parts) -> tuple[Tensor, ...]:
        ctx.parts, ctx.dtype = parts, packed.dtype
        found = _part(packed, parts)
        ctx.mark_non_differentiable(*(part for part in found if not part.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        given = [
            torch.zeros(shape, dtype=dtype, device=gradients[0].device) if not dtype.is_floating_point else gradient
            for gradient, (shape, dtype) in zip(gradients, ctx.parts, strict=True)
        ]
        return _join(given, ctx.dtype), None


def _join(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    rooms = [_room(tensor.shape, tensor.dtype) for tensor in tensors]
    bits = torch.zeros(sum(rooms), dtype=torch.uint8, device=tensors[0].device)
    for tensor, room in zip(tensors, bits.split(rooms), strict=True):
        room[: tensor.numel() * tensor.element_size()] = tensor.contiguous().reshape(-1).view(torch.uint8)
    return bits.view(dtype)


def _part(packed: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    bits = packed.contiguous().view(torch.uint8)
    found, start = [], 0
    for shape, dtype in parts:
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append(bits[start : start + size].view(dtype).view(tuple(shape)).clone())
        start += _room(shape, dtype)
    return tuple(found)
