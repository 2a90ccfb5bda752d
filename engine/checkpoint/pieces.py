"""Pieces: contiguous parts of named tensors, and their metadata once stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
import xxhash
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The elements ``start`` to ``start + data.numel()`` of a flattened tensor.

    Attributes:
        name: the tensor's name, such as ``weight/model.norm.weight``.
        shape: the tensor's shape.
        start: index of the first element in the flattened tensor.
        data: the elements, shape [n], or the tensor's shape if the piece is the entire tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """Make one piece of an entire tensor."""
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

    Pieces may overlap, because ranks that share no file system may write the same elements.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return prod(self.shape)

    def missing(self) -> str:
        """Return a range of elements that no piece covers, as text, or empty if the pieces cover the tensor."""
        at = 0
        for piece in self.pieces:
            if piece.start > at:
                return f"{at} to {piece.start}"
            at = max(at, piece.stop)
        return "" if at == self.num_elements else f"{at} to {self.num_elements}"


def checksum(data: memoryview | bytes) -> str:
    """Return XXH3-128 in hex, which misses corruption with probability 2^-128, at 10+ GB/s per core."""
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
