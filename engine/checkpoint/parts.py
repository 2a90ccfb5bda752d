"""Parts of divided tensors in a checkpoint: their names, and the whole tensors that they make up.

A part is stored as a tensor of its own, named ``part/DIM.INDEX.COUNT.BLOCKS/NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from weft.engine.parallel.cut import Cut

PART = "part"
_NAME = re.compile(rf"{PART}/(\d{{1,9}})\.(\d{{1,9}})\.(\d{{1,9}})\.(\d{{1,9}})/(.+)", re.DOTALL)


def stored_name(name: str, cut: Cut | None) -> str:
    """Return the name under which a rank stores its part of a tensor."""
    return name if cut is None else f"{PART}/{cut.dim}.{cut.index}.{cut.count}.{cut.blocks}/{name}"


def whole_name(stored: str) -> str:
    """Return the name of the whole tensor of a stored tensor or part."""
    match = _NAME.fullmatch(stored)
    return match.group(5) if match else stored


def cut_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Cut, ...]]:
    """Return the cuts of each tensor that is stored in parts, in order.

    Args:
        shapes: of stored tensors, by their names.

    Raises:
        ValueError: parts do not make up a tensor.
    """
    found: dict[str, list[Cut]] = {}
    for stored, shape in shapes.items():
        if match := _NAME.fullmatch(stored):
            dim, index, count, blocks = map(int, match.groups()[:4])
            found.setdefault(match.group(5), []).append(_cut(stored, shape, dim, index, count, blocks))
    return {name: _whole(name, parts, shapes) for name, parts in found.items()}


def _cut(stored: str, shape: Sequence[int], dim: int, index: int, count: int, blocks: int) -> Cut:
    if dim >= len(shape) or not index < count or blocks < 1 or shape[dim] % blocks:
        raise ValueError(f"{stored[:200]}: {list(shape)} is no such part")
    return Cut((*shape[:dim], shape[dim] * count, *shape[dim + 1 :]), dim, index, count, blocks)


def _whole(name: str, parts: list[Cut], shapes: Iterable[str]) -> tuple[Cut, ...]:
    parts.sort(key=lambda cut: cut.index)
    first = parts[0]
    alike = {(cut.shape, cut.dim, cut.count, cut.blocks) for cut in parts}
    complete = len(parts) == first.count and [cut.index for cut in parts] == list(range(len(parts)))
    if name in shapes or len(alike) > 1 or not complete:
        raise ValueError(f"{name[:200]}: its stored parts do not make up one tensor")
    return tuple(parts)


def overlap(a: Cut, b: Cut) -> bool:
    """True if two parts of one tensor have an element in common."""
    if a.dim != b.dim:
        return bool(prod(a.shape))
    return any(start < end and begin < stop for start, stop in a.ranges for begin, end in b.ranges)
