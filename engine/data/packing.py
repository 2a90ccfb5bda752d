"""Packing: which pieces of which documents fill each sequence of a block."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

OPEN_SEQUENCES = 64
"""Sequences with room that whole-document packing keeps in reach."""


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of document ``document``."""

    document: int
    start: int
    stop: int


class Layout(Protocol):
    """The sequences of one block, in training order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> list[Piece]: ...


@dataclass(frozen=True)
class ContiguousLayout:
    """Documents end to end, cut every ``sequence_length`` tokens; every token appears once.

    Attributes:
        order: documents as they are joined, shape [documents].
        ends: tokens up to and including each of them, shape [documents].
        sequences: sequences in training order, shape [sequences].
    """

    order: np.ndarray
    ends: np.ndarray
    sequences: np.ndarray
    sequence_length: int

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> list[Piece]:
        first = int(self.sequences[index]) * self.sequence_length
        last = min(first + self.sequence_length, int(self.ends[-1]))
        pieces = []
        at = int(np.searchsorted(self.ends, first, side="right"))
        while first < last:
            begin = int(self.ends[at - 1]) if at else 0
            stop = min(last, int(self.ends[at]))
            if stop > first:
                pieces.append(Piece(int(self.order[at]), first - begin, stop - begin))
            first, at = stop, at + 1
        return pieces


@dataclass(frozen=True)
class WholeLayout:
    """Each sequence holds whole documents.

    Attributes:
        order: documents, sequence after sequence, shape [documents].
        ends: documents up to and including each sequence, shape [sequences].
        lengths: tokens of each document by its number, shape [documents].
    """

    order: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> list[Piece]:
        first = int(self.ends[index - 1]) if index else 0
        return [Piece(int(d), 0, int(self.lengths[d])) for d in self.order[first : int(self.ends[index])]]


def lay_out_contiguous(lengths: np.ndarray, sequence_length: int, shuffle: np.random.Generator | None) -> Layout:
    """Join all documents and cut; for text, where a document may go on in another sequence.

    Documents are shuffled before they are joined, and the sequences after they are cut, so
    that the parts of a long document do not follow each other.
    """
    order = _order(len(lengths), shuffle)
    ends = np.cumsum(lengths[order])
    count = -(-int(ends[-1]) // sequence_length) if len(ends) else 0
    return ContiguousLayout(order, ends, _order(count, shuffle), sequence_length)


def lay_out_single(lengths: np.ndarray, sequence_length: int, shuffle: np.random.Generator | None) -> Layout:
    """One document per sequence: no packing."""
    assert lengths.max(initial=0) <= sequence_length, "the encoder cuts"
    order = _order(len(lengths), shuffle)
    order = order[lengths[order] > 0]
    return WholeLayout(order, np.arange(1, len(order) + 1), lengths)


def lay_out_whole(lengths: np.ndarray, sequence_length: int, shuffle: np.random.Generator | None) -> Layout:
    """Several whole documents per sequence; for conversations, which lose their sense when cut.

    Best fit in order: each document goes to the fullest open sequence that has room. A
    sequence closes when it is full, or when too many are open and it is the fullest.
    """
    assert lengths.max(initial=0) <= sequence_length, "the encoder cuts"
    closed: list[list[int]] = []
    open_: list[tuple[int, int, list[int]]] = []  # (room, serial, documents), ascending
    for serial, document in enumerate(_order(len(lengths), shuffle).tolist()):
        size = int(lengths[document])
        if size == 0:
            continue
        at = bisect_left(open_, (size,))
        room, _, members = open_.pop(at) if at < len(open_) else (sequence_length, serial, [])
        members.append(document)
        if room == size:
            closed.append(members)
        else:
            insort(open_, (room - size, serial, members))
        if len(open_) > OPEN_SEQUENCES:
            closed.append(open_.pop(0)[2])
    closed.extend(members for _, _, members in open_)
    closed = [closed[i] for i in _order(len(closed), shuffle)]
    order = np.array([document for members in closed for document in members], dtype=np.int64)
    return WholeLayout(order, np.cumsum([len(members) for members in closed], dtype=np.int64), lengths)


def _order(count: int, shuffle: np.random.Generator | None) -> np.ndarray:
    return shuffle.permutation(count) if shuffle is not None else np.arange(count)
