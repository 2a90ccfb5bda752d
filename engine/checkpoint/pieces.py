"""Pieces: contiguous ranges of the elements of named tensors.

If ranks hold parts of a tensor, each part is stored as a tensor with the name ``part/DIM.INDEX.COUNT.BLOCKS/NAME``.

"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import xxhash
from torch import Tensor

from weft.engine.parallel.cut import Cut


@dataclass(frozen=True)
class Piece:
    """The elements ``start`` to ``start + data.numel()`` of a flattened tensor.

    Attributes:
        name: the tensor's name, such as ``weight/model.norm.weight``.
        start: index of the first element in the flattened tensor.
        data: the elements, shape [n], or the tensor's shape if the piece is the entire tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """Return a piece with all elements of a tensor."""
        return cls(name, tuple(tensor.shape), 0, tensor.detach())

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.data.numel() * self.data.element_size()

    @property
    def is_whole(self) -> bool:
        """True if the piece is the entire tensor."""
        return self.data.numel() == prod(self.shape)


@dataclass(frozen=True)
class StoredPiece:
    """Location and checksum of a stored piece."""

    start: int
    stop: int
    file: str
    key: str
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor: dtype by safetensors' name, and its pieces in order.

    Pieces may overlap, because ranks on different file systems may write the same elements.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return prod(self.shape)

    def missing(self) -> str:
        """Describe a range of elements that no piece covers. Return an empty string if the pieces cover the tensor."""
        at = 0
        for piece in self.pieces:
            if piece.start > at:
                return f"{at} to {piece.start}"
            at = max(at, piece.stop)
        return "" if at == self.num_elements else f"{at} to {self.num_elements}"


def checksum(data: memoryview | bytes) -> str:
    """Return the XXH3-128 hash in hex. It misses corruption with probability 2^-128, and takes 0.1 s/GB on a core."""
    return xxhash.xxh3_128_hexdigest(data)


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def share(pieces: Iterable[Piece], index: int, count: int) -> Iterator[Piece]:
    """Split ``pieces``, which ``count`` ranks hold identically, into parts of equal bytes, and yield part ``index``.

    Pieces are concatenated and cut, so that at most two pieces per part are cut.
    """
    held = list(pieces)
    total = sum(piece.num_bytes for piece in held)
    first, last = total * index // count, total * (index + 1) // count
    at = 0
    for piece in held:
        size = max(1, piece.data.element_size())
        # An element belongs to the part that holds its first byte.
        start = min(max(0, -(-(first - at) // size)), piece.data.numel())
        stop = min(max(0, -(-(last - at) // size)), piece.data.numel())
        at += piece.num_bytes
        if stop - start == piece.data.numel():
            yield piece
        elif stop > start:
            yield replace(piece, start=piece.start + start, data=piece.data.reshape(-1)[start:stop])


PART = "part"
_NAME = re.compile(rf"{PART}/(\d{{1,9}})\.(\d{{1,9}})\.(\d{{1,9}})\.(\d{{1,9}})/(.+)", re.DOTALL)


def stored_name(name: str, cut: Cut | None) -> str:
    """Return the name under which a rank stores its part ``cut`` of a tensor. None means the whole tensor."""
    return name if cut is None else f"{PART}/{cut.dim}.{cut.index}.{cut.count}.{cut.blocks}/{name}"


def whole_name(stored: str) -> str:
    """Return the name of the whole tensor to which a stored tensor or part belongs."""
    match = _NAME.fullmatch(stored)
    return match.group(5) if match else stored


def cut_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Cut, ...]]:
    """Return the parts of each tensor that is stored in parts, in order.

    Args:
        shapes: shapes of stored tensors, by their names.

    Raises:
        ValueError: the parts of a tensor are incomplete.
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
