"""Accumulation of a received gradient into a shard, with the sum of its squares in the same pass on a GPU."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from weft.conf.host.triton import is_interpreted

RECEIVED = (torch.float32, torch.bfloat16, torch.float16)
"""Formats of received gradients that the kernel reads."""


def accumulate(shard: Tensor, received: Tensor, *, adds: bool) -> Tensor | None:
    """Cast a received gradient to the format of ``shard``, and add it or, unless ``adds``, store it there.

    Args:
        shard: the gradient of this rank's shard, [n].
        received: a sum over replicas, [n], in the format in which it was sent.

    Returns:
        The sums of squares of consecutive parts of the new shard, fp32 on its device. None: they were not computed.
    """
    if shard.is_cuda and _is_fused(shard, received):
        from weft.engine.zero.kernels.accumulation_triton import accumulate_fused

        return accumulate_fused(shard, received, adds=adds)
    accumulate_plain(shard, received, adds=adds)
    return None


def accumulate_plain(shard: Tensor, received: Tensor, *, adds: bool) -> None:
    """Do the same by torch's operations, without squares. The kernel's shard has the same bits."""
    if adds:
        shard.add_(received)
    else:
        shard.copy_(received)


def compile_for(device: torch.device, formats: Collection[torch.dtype]) -> None:
    """Compile and load the kernel for these formats of received gradients.

    To load code later, while a kernel waits for another rank, may block the host.
    """
    for dtype in formats if device.type == "cuda" else ():
        for adds in (False, True):
            accumulate(torch.zeros(8, device=device), torch.zeros(8, dtype=dtype, device=device), adds=adds)


def _is_fused(shard: Tensor, received: Tensor) -> bool:
    formats = shard.dtype is torch.float32 and received.dtype in RECEIVED
    return formats and shard.is_contiguous() and received.is_contiguous() and _compiles()


@cache
def _compiles() -> bool:
    """True if Triton compiles kernels here. Its interpreter would copy tensors to the host."""
    return find_spec("triton") is not None and not is_interpreted()
