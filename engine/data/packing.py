"""Packing: the layout of a block's documents in sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

OPEN_SEQUENCES = 64
"""Largest number of unfilled sequences in packing of whole documents."""


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of document ``document``."""

    document: int
    start: int
    stop: int


class Layout(Protocol):
    """The sequences of one block, in training order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> list[Piece]: ...


@dataclass(frozen=True)
class ContiguousLayout:
    """Documents concatenated and cut every ``sequence_length`` tokens, so that every token appears once.

    Attributes:
        order: documents in the order of concatenation, shape [documents].
        ends: cumulative tokens up to the end of each document, shape [documents].
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
    """Sequences that contain whole documents.

    Attributes:
        order: documents in the order of the sequences, shape [documents].
        ends: cumulative number of documents up to the end of each sequence, shape [sequences].
        lengths: number of tokens of each document, shape [documents].
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
    """Concatenate all documents and cut them into sequences, for text, whose documents may continue in another
    sequence.

    Documents are shuffled before they are concatenated, and sequences after they are cut. So the parts of a long
    document do not follow each other.
    """
    order = _order(len(lengths), shuffle)
    ends = np.cumsum(lengths[order])
    count = -(-int(ends[-1]) // sequence_length) if len(ends) else 0
    return ContiguousLayout(order, ends, _order(count, shuffle), sequence_length)


def lay_out_single(lengths: np.ndarray, sequence_length: int, shuffle: np.random.Generator | None) -> Layout:
    """Lay out one document per sequence, without packing. Empty documents are left out."""
    assert lengths.max(initial=0) <= sequence_length, "the encoder cuts"
    order = _order(len(lengths), shuffle)
    order = order[lengths[order] > 0]
    return WholeLayout(order, np.arange(1, len(order) + 1), lengths)


def lay_out_whole(lengths: np.ndarray, sequence_length: int, shuffle: np.random.Generator | None) -> Layout:
    """Lay out several whole documents per sequence, for conversations, which must not be cut.

    Online best fit: each document goes into the fullest unfinished sequence with enough space. A sequence is finished
    when it is full. If more than `OPEN_SEQUENCES` are unfinished, the fullest is finished.
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
