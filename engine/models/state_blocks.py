"""Blocks of consecutive elements of a parameter that an optimiser's state describes together, and no shard cuts."""

from __future__ import annotations

from torch import Tensor

_NAME = "_weft_state_block"


def set_block(tensor: Tensor, size: int) -> None:
    """Set the size of blocks of a parameter, or of the part of one that an optimiser steps."""
    setattr(tensor, _NAME, size)


def block_of(tensor: Tensor) -> int:
    """Return the size of blocks, in elements. 1: a shard may end anywhere."""
    size: int = getattr(tensor, _NAME, 1)
    return size
