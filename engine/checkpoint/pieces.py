"""The piece: a contiguous part of one named tensor, and what is known of it once it is stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
import xxhash
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``start + data.numel()`` of a flattened tensor.

    Attributes:
        name: the whole tensor's name, such as ``weight/model.norm.weight``.
        shape: the whole tensor's shape.
        start: index of the first element in the flattened whole.
        data: the elements, shape [n], or any shape when the piece is the whole.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """A tensor in one piece."""
        return cls(name, tuple(tensor.shape), 0, tensor.detach())

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece."""
        return self.data.numel() * self.data.element_size()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.data.numel() == prod(self.shape)


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece is, and what its bytes must hash to."""

    start: int
    stop: int
    file: str
    key: str
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: dtype by safetensors' name, and its pieces in order.

    Ranks that share no file system may each have written the same elements.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def missing(self) -> str:
        """Elements that no piece holds, as text; empty if the pieces cover the tensor."""
        at = 0
        for piece in self.pieces:
            if piece.start > at:
                return f"{at} to {piece.start}"
            at = max(at, piece.stop)
        return "" if at == self.num_elements else f"{at} to {self.num_elements}"


def checksum(data: memoryview | bytes) -> str:
    """XXH3-128 in hex: an error in storage passes with probability 2^-128, at 10+ GB/s per core."""
    return xxhash.xxh3_128_hexdigest(data)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, not copied if it is contiguous."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def share(pieces: Iterable[Piece], index: int, count: int) -> Iterator[Piece]:
    """Part ``index`` of ``count`` parts of equal bytes, for pieces that ``count`` ranks hold alike.

    The pieces are laid end to end and cut; at most two pieces per part are cut.
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
