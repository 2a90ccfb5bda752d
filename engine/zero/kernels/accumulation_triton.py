"""The Triton kernel that accumulates a received gradient into a shard and sums its squares."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements of a program, whose squares are summed in fp32 in a tree."""


def accumulate_fused(shard: Tensor, received: Tensor, *, adds: bool, block: int = BLOCK) -> Tensor:
    """Accumulate as `weft.engine.zero.kernels.accumulation.accumulate` does.

    Args:
        shard: fp32, [n], contiguous.
        received: fp32, bf16 or fp16, [n], contiguous.
        block: elements of a program, a power of two.

    Returns:
        The sum of squares of each ``block`` elements, without atomic operations, so that it repeats exactly.
    """
    count = triton.cdiv(shard.numel(), block)
    squares = torch.empty(count, dtype=torch.float32, device=shard.device)
    if count:
        _accumulate[(count,)](shard, received, squares, shard.numel(), adds, block)
    return squares


@triton.jit(do_not_specialize=["length"])
def _accumulate(shard: Any, received: Any, squares: Any, length: Any, adds: tl.constexpr, block: tl.constexpr) -> None:
    number = tl.program_id(0)
    index = elements(number, block)
    inside = index < length
    value = tl.load(received + index, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(shard + index, mask=inside, other=0.0)
    tl.store(shard + index, value, mask=inside)
    tl.store(squares + number, tl.sum(value * value, axis=0))


@triton.jit
def elements(number: Any, block: tl.constexpr) -> Any:
    """Return the indices of a program's elements in 64 bits. A shard may have more than 2**31 elements."""
    return number.to(tl.int64) * block + tl.arange(0, block)
