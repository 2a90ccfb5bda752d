"""A mixture: the documents of several sources, by their shares of the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.engine.data.documents import Document, Documents
from weft.engine.data.source import BLOCK_TOKENS, Block, Source


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A source of a mixture with its weight.

    Attributes:
        weight: share of the tokens, relative to the other parts.
        epochs: passes over the source. 0 repeats it without end.
    """

    source: Source
    weight: float
    epochs: int = 0


class MixedSource:
    """Several sources as one.

    The next document comes from the source with the fewest tokens so far in relation to its weight. So each prefix has
    the configured shares to within a document, and nothing about the choice is random. Each block of a source is
    permuted before its documents are drawn. The saved state is each source's position at the start of the block.
    """

    def __init__(self, parts: Sequence[Weighted], *, block_documents: int) -> None:
        self._parts = parts
        self._block_documents = block_documents
        identity = [(part.source.identity, part.weight, part.epochs) for part in parts]
        self.identity = hashlib.sha256(repr((identity, block_documents)).encode()).hexdigest()

    @property
    def description(self) -> str:
        """One line of text about all sources, their shares, and what follows when they are exhausted."""
        total = sum(part.weight for part in self._parts)
        return "mixture of " + "; ".join(
            f"{part.source.description} ({part.weight / total:.1%} of tokens, "
            f"{f'ends after {part.epochs} epochs' if part.epochs else 'repeated'})"
            for part in self._parts
        )

    def blocks(self, start: dict[str, Any], shuffle: int) -> Iterator[Block]:
        """Yield the blocks of one pass, which ends when every source has ended."""
        states = start.get("sources", [{}] * len(self._parts))
        readers = [
            _Reader(part, (shuffle, number) if shuffle else None, state)
            for number, (part, state) in enumerate(zip(self._parts, states, strict=True))
        ]
        active = [(reader.share, number) for number, reader in enumerate(readers)]
        while active:
            begin = {"sources": [reader.state() for reader in readers]}
            documents: list[tuple[Documents, int]] = []
            lengths: list[int] = []
            tokens = 0
            while active and len(lengths) < self._block_documents and tokens < BLOCK_TOKENS:
                _, number = item = min(active)
                active.remove(item)
                drawn = next(readers[number], None)
                if drawn is None:  # exhausted
                    continue
                documents.append(drawn[:2])
                lengths.append(drawn[2])
                tokens += drawn[2]
                active.append((readers[number].share, number))
            if lengths:
                yield Block(_Drawn(documents, np.array(lengths, dtype=np.int64)), begin)


class _Drawn:
    """Documents of several sources, which are read when they are needed."""

    def __init__(self, documents: Sequence[tuple[Documents, int]], lengths: np.ndarray) -> None:
        self._documents = documents
        self.lengths = lengths

    def __getitem__(self, index: int) -> Document:
        documents, number = self._documents[index]
        return documents[number]


class _Reader(Iterator[tuple[Documents, int, int]]):
    """The documents of one source, pass after pass: their block, index and number of tokens."""

    def __init__(self, part: Weighted, seed: tuple[int, ...] | None, state: dict[str, Any]) -> None:
        self._part, self._seed = part, seed
        self._epoch, self._block = state.get("epoch", 0), state.get("block", 0)
        self._index: int = state.get("index", 0)
        self._tokens: int = state.get("tokens", 0)
        self._start: dict[str, Any] = state.get("start", {})
        self._documents = self._read()

    @property
    def share(self) -> float:
        """Tokens so far in relation to the weight."""
        return self._tokens / self._part.weight

    def state(self) -> dict[str, Any]:
        state = {"epoch": self._epoch, "block": self._block, "index": self._index, "tokens": self._tokens}
        return {**state, "start": self._start}

    def __next__(self) -> tuple[Documents, int, int]:
        return next(self._documents)

    def _read(self) -> Iterator[tuple[Documents, int, int]]:
        source = self._part.source
        while not self._part.epochs or self._epoch < self._part.epochs:
            found = self._block > 0
            for block in source.blocks(self._start, self._file_seed()):
                self._start = block.start
                lengths = block.documents.lengths
                order = self._order(len(lengths))
                found |= len(order) > 0
                while self._index < len(order):
                    number = int(order[self._index])
                    self._index += 1
                    self._tokens += int(lengths[number])
                    yield block.documents, number, int(lengths[number])
                self._block, self._index = self._block + 1, 0
            if not found:
                raise ValueError(f"data.path: {source.description}: not one document with text; give it some")
            self._epoch, self._block, self._index, self._start = self._epoch + 1, 0, 0, {}

    def _file_seed(self) -> int:
        return 0 if self._seed is None else 1 + int(self._generator().integers(2**31))

    def _order(self, count: int) -> np.ndarray:
        return np.arange(count) if self._seed is None else self._generator(self._block).permutation(count)

    def _generator(self, *further: int) -> np.random.Generator:
        assert self._seed is not None
        return np.random.default_rng((*self._seed, self._epoch, *further))
