"""The global order of sequences. It depends only on the data, its settings and the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from weft.engine.data.documents import Document
from weft.engine.data.packing import Layout
from weft.engine.data.source import Block, Source

LayOut = Callable[[np.ndarray, int, "np.random.Generator | None"], Layout]
"""Function from document lengths, sequence length and a random generator (or None) to the layout of a block."""


Ranges = Sequence[tuple[int, int]]
"""Ranges of sequences: their first number in the global order, and the number after the last."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """A position in the global order, before the next sequence. All fields are JSON values."""

    epoch: int = 0
    """Number of completed passes over the data."""
    block: int = 0
    """Index of the block in its pass."""
    sequence: int = 0
    """Index of the sequence in its block."""
    consumed: int = 0
    """Number of sequences before this position, over all replicas and passes."""
    start: dict[str, Any] = field(default_factory=dict)
    """State of the source at the start of the block."""


class Placed(NamedTuple):
    """A block of documents, its layout, and the cursor of its first sequence."""

    block: Block
    layout: Layout
    cursor: Cursor

    def at(self, sequence: int) -> Cursor:
        """Return the cursor of a sequence of the block.

        The number of its sequences gives the start of the next block.
        """
        return replace(self.cursor, sequence=sequence, consumed=self.cursor.consumed + sequence)

    def documents(self, sequence: int) -> list[Document]:
        """Return the pieces of documents that fill a sequence."""
        pieces = []
        for number, start, stop in self.layout[sequence]:
            ids, labels = self.block.documents[number]
            pieces.append(Document(ids[start:stop], labels[start:stop]))
        return pieces


@dataclass(frozen=True, kw_only=True)
class Order:
    """Everything that determines the global order.

    Attributes:
        lay_out: packs the documents of a block into sequences.
        shuffle: permute documents and sequences within a block, differently in each epoch.
        endless: repeat epochs without end. Otherwise run a single epoch.
    """

    source: Source
    lay_out: LayOut
    sequence_length: int
    shuffle: bool
    seed: int
    endless: bool

    @property
    def identity(self) -> str:
        """Hash that a checkpoint stores, to check that its cursor belongs to the same order."""
        parts = (self.source.identity, self.lay_out.__name__, self.sequence_length, self.shuffle, self.seed)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def blocks(self, cursor: Cursor) -> Iterator[Placed]:
        """Yield the blocks, beginning with the block of ``cursor``.

        Raises:
            ValueError: a pass has no document, or a document cannot be encoded.
        """
        epoch, number, start = cursor.epoch, cursor.block, cursor.start
        consumed = cursor.consumed - cursor.sequence
        while True:
            found = number > 0
            for block in self.source.blocks(start, self._file_seed(epoch)):
                layout = self._layout(block, epoch, number)
                found |= len(layout) > 0
                yield Placed(block, layout, Cursor(epoch=epoch, block=number, consumed=consumed, start=block.start))
                number, consumed = number + 1, consumed + len(layout)
            if not self.endless:
                return
            if not found:
                raise ValueError(f"data.path: {self.source.description}: not one document with text; give it some")
            epoch, number, start = epoch + 1, 0, {}

    def num_sequences(self, epoch: int) -> int:
        """Return the number of sequences in one pass. A streamed source is read completely for this."""
        blocks = self.source.blocks({}, self._file_seed(epoch))
        return sum(len(self._layout(block, epoch, number)) for number, block in enumerate(blocks))

    def _file_seed(self, epoch: int) -> int:
        return 1 + int(np.random.default_rng((self.seed, epoch)).integers(2**31)) if self.shuffle else 0

    def _layout(self, block: Block, epoch: int, number: int) -> Layout:
        generator = np.random.default_rng((self.seed, epoch, number)) if self.shuffle else None
        return self.lay_out(block.documents.lengths, self.sequence_length, generator)


def sequences(blocks: Iterator[Placed], cursor: Cursor, left_out: Ranges = ()) -> Iterator[tuple[Placed, int]]:
    """Yield each sequence from ``cursor`` on that is not ``left_out``, as its block and its index in the block."""
    first = cursor.sequence
    for placed in blocks:
        for sequence in range(first, len(placed.layout)):
            number = placed.cursor.consumed + sequence
            if not any(start <= number < stop for start, stop in left_out):
                yield placed, sequence
        first = 0
