"""Tokenised documents, before they are packed into sequences."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from datasets import Dataset

IGNORED = -100
"""Label of a position that is ignored in the loss, as in torch and Hugging Face."""


class Document(NamedTuple):
    """A tokenised text or conversation.

    Attributes:
        ids: token ids, shape [tokens].
        labels: the id for tokens that count in the loss, otherwise -100, shape [tokens].
    """

    ids: np.ndarray
    labels: np.ndarray


class Documents(Protocol):
    """Documents with random access, whose lengths are known without reading them."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, shape [documents]."""
        ...

    def __getitem__(self, index: int) -> Document: ...


@dataclass(frozen=True)
class InMemory:
    """The documents of one block of a stream."""

    items: Sequence[Document]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, shape [documents]."""
        return np.array([len(item.ids) for item in self.items], dtype=np.int64)

    def __getitem__(self, index: int) -> Document:
        return self.items[index]


class OnDisk:
    """Documents of a tokenised data set, read through its memory map without a copy."""

    def __init__(self, dataset: Dataset, rows: np.ndarray) -> None:
        """Select ``rows`` of ``dataset``, whose columns are input_ids, labels (optional) and length."""
        names = [name for name in ("input_ids", "labels") if name in dataset.column_names]
        # Arrow's own access takes a tenth of the time that `Dataset.__getitem__` takes.
        self._columns = [dataset.data.column(name) for name in names]
        self._rows = rows
        self.lengths = column(dataset, "length")[rows].astype(np.int64)

    def __getitem__(self, index: int) -> Document:
        row = int(self._rows[index])
        values = [column[row].values.to_numpy() for column in self._columns]
        return Document(values[0], values[-1])


def column(dataset: Dataset, name: str) -> np.ndarray:
    """Return a column of numbers as one array, shape [rows]."""
    return dataset.data.column(name).to_numpy()


def document_key(ids: Sequence[int]) -> int:
    """Return a number below 2^32 that depends only on a document's tokens."""
    return zlib.crc32(np.asarray(ids, dtype="<i4").tobytes())


def text_key(text: str) -> int:
    """Return a number below 2^32 that depends only on a text, for documents whose tokens are incomplete."""
    return zlib.crc32(text.encode())


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a split of documents into training and held-out evaluation data.

    The split depends only on contents. Equal documents are in the same part, and a document stays in
    its part when others are added, except for those at the boundary.

    Attributes:
        fraction: fraction of documents held out for evaluation.
        evaluation: whether this is the held-out part. Otherwise it is the rest.
    """

    fraction: float
    evaluation: bool

    def of_all(self, keys: np.ndarray) -> np.ndarray:
        """Return a mask of the documents in this part: bool, shape [documents]. The source has a known size.

        At least one document is held out if ``fraction`` is above 0.
        """
        held = np.zeros(len(keys), dtype=bool)
        if self.fraction > 0 and len(keys):
            count = max(1, round(len(keys) * self.fraction))
            held = keys <= np.sort(keys)[count - 1]
        return held == self.evaluation

    def of_stream(self, key: int) -> bool:
        """True if a document is in this part. The source is a stream of unknown size."""
        return (key < self.fraction * 2**32) == self.evaluation
