"""Sources: the tokenised documents of one pass over the data, in blocks that are shuffled and packed together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.arrow_writer import ArrowWriter
from datasets.utils import tqdm
from filelock import FileLock

from weft.conf.host.owners import is_trusted, own_folder
from weft.engine.data.documents import Document, Documents, InMemory, OnDisk, Part, column
from weft.engine.data.encode import Encoder
from weft.engine.data.messages import without_nulls
from weft.engine.data.prefetch import check_open
from weft.engine.data.tokens import AT_ONCE

ENCODED_AT_ONCE = 256
"""Largest number of rows per call of the tokenizer."""
BLOCK_TOKENS = 2**25
"""Number of tokens at which a block of a stream ends, even if it has few documents."""


class Block(NamedTuple):
    """Documents that are shuffled and packed together.

    Attributes:
        start: state (JSON values) for `Source.blocks` to start with this block again.
    """

    documents: Documents
    start: dict[str, Any]


class Source(Protocol):
    """A source of tokenised documents."""

    @property
    def description(self) -> str:
        """One line of text about the source."""
        ...

    @property
    def identity(self) -> str:
        """Hex hash of the data. A cursor is valid only for a source with the same identity."""
        ...

    def blocks(self, start: dict[str, Any], shuffle: int) -> Iterator[Block]:
        """Yield the blocks of one pass.

        Args:
            start: ``Block.start`` of the first block to yield. ``{}`` means the beginning.
            shuffle: seed of the order of files. 0 keeps their order. The caller shuffles documents within a block.
        """


class LoadedSource:
    """A tokenised data set on disk. A pass over it is one block."""

    def __init__(self, dataset: Dataset, encoder: Encoder, *, name: str, part: Part) -> None:
        """Select a part of a tokenised ``dataset``. Raise ValueError if the part is empty."""
        keys, lengths, truncated = (column(dataset, name) for name in ("key", "length", "truncated"))
        chosen = part.of_all(keys)
        rows = np.flatnonzero(chosen & (lengths > 0))
        if not len(rows):
            raise no_documents(name, encoder, part, len(keys))
        self.documents = OnDisk(dataset, rows)
        self.identity = hashlib.sha256(keys[rows].tobytes()).hexdigest()
        size = f"{len(rows)} {encoder.unit}, {self.documents.lengths.sum() / 1e6:.3g} M tokens"
        self.description = f"{name}: {size}{_losses(int(truncated[rows].sum()), int((chosen & (lengths == 0)).sum()))}"

    def blocks(self, start: dict[str, Any], shuffle: int) -> Iterator[Block]:
        """Yield the only block."""
        yield Block(self.documents, {})


class StreamedSource:
    """A data set that is tokenised during training.

    A block has the next ``block_documents`` documents, or fewer if they reach `BLOCK_TOKENS` tokens. The saved state is
    the data set's state at the start of the block. So a resumed run reads at most one block again, and no documents are
    saved.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        encoder: Encoder,
        *,
        name: str,
        part: Part,
        block_documents: int,
        typed: bool = True,
    ) -> None:
        """Read a part of a streamed ``dataset``.

        Args:
            typed: whether rows come from a typed table, whose null values are removed.
        """
        self._dataset = dataset
        self._typed = typed
        self._encoder = encoder
        self._part = part
        self._block_documents = block_documents
        self._name = name
        self._truncated = self._left_out = 0
        parts = (name, encoder.sha256, part, block_documents)
        self.identity = hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def description(self) -> str:
        """One line of text about the source, with the number of rows that were truncated or left out so far."""
        losses = _losses(self._truncated, self._left_out)
        return f"{self._name}: {self._encoder.unit}, streamed in blocks of {self._block_documents}{losses}"

    def blocks(self, start: dict[str, Any], shuffle: int) -> Iterator[Block]:
        """Yield the blocks from ``start`` on. The last block may be smaller. Only one iteration may run at a time."""
        number = start.get("row", 0)
        dataset = self._dataset.with_format(None)  # a new iteration over the same files
        dataset.set_epoch(shuffle)
        if start:
            dataset.load_state_dict(start["dataset"])
        rows = map(without_nulls, dataset) if self._typed else iter(dataset)
        while True:
            items: list[Document] = []
            first = number
            while room := self._room(items):
                check_open()
                values = [self._encoder.value_of(row) for row in _some(rows, room)]
                if not values:
                    break
                items += self._encode(values, number)
                number += len(values)
            if number == first:
                return
            if items:
                yield Block(InMemory(items), start)
            start = {"row": number, "dataset": dataset.state_dict()}

    def _room(self, items: list[Document]) -> int:
        """Return the number of rows to encode next, or 0 if the block is complete."""
        full = sum(len(item.ids) for item in items) >= BLOCK_TOKENS
        return 0 if full else min(ENCODED_AT_ONCE, self._block_documents - len(items))

    def _encode(self, values: list[Any], number: int) -> list[Document]:
        columns = self._encoder(values, range(number, number + len(values)))
        labels = columns.get("labels", columns["input_ids"])
        self._left_out += columns["length"].count(0)
        self._truncated += sum(
            cut and length > 0 for cut, length in zip(columns["truncated"], columns["length"], strict=True)
        )
        return [
            Document(np.asarray(ids, dtype=np.int32), np.asarray(wanted, dtype=np.int32))
            for ids, wanted, key in zip(columns["input_ids"], labels, columns["key"], strict=True)
            if ids and self._part.of_stream(key)
        ]


def no_documents(name: str, encoder: Encoder, part: Part, rows: int) -> ValueError:
    """Return the error of a source, one of whose parts has no document with something to learn."""
    return ValueError(
        f"data.path={name}: no {encoder.unit} for {'evaluation' if part.evaluation else 'training'} "
        f"among {rows} rows; give more, or change data.eval_fraction={part.fraction:g} or data.eval_split"
    )


def _losses(truncated: int, left_out: int) -> str:
    """Return text about rows that were truncated or left out."""
    parts = ((truncated, "truncated"), (left_out, "left out (nothing to learn in them)"))
    return "".join(f", {count} {what}" for count, what in parts if count)


def tokenised(rows: Iterable[Mapping[str, Any]], encoder: Encoder, *, name: str, cache: Path) -> Dataset:
    """Tokenise ``rows`` once, into a file in ``cache`` that every rank memory-maps.

    A file that another user could have written is replaced.

    Args:
        name: hash of the rows' contents. The file's name is made from it and from the encoder's hash.
    """
    own_folder(cache, "data.cache_dir")
    key = hashlib.sha256(f"{name} {encoder.sha256}".encode()).hexdigest()
    file = cache / f"tokens-{key[:24]}.arrow"
    with FileLock(f"{file}.lock"):  # one rank tokenises, the others find its file
        if not file.exists() or not is_trusted(file):
            draft = file.with_suffix(".draft")
            _write(rows, encoder, draft)
            draft.chmod(0o600)
            draft.replace(file)
    return Dataset.from_file(str(file))


def _write(rows: Iterable[Mapping[str, Any]], encoder: Encoder, file: Path) -> None:
    tokens = List(Value("int32"))
    features = {"input_ids": tokens, "length": Value("int64"), "key": Value("int64"), "truncated": Value("bool")}
    if encoder.unit != "documents":
        features["labels"] = tokens
    number = 0
    remaining = iter(rows)
    with ArrowWriter(path=str(file), features=Features(features)) as writer, tqdm(desc="tokenising") as progress:
        while some := _some(remaining, ENCODED_AT_ONCE):
            values = [encoder.value_of(row) for row in some]
            writer.write_batch(encoder(values, range(number, number + len(some))))
            number += len(some)
            progress.update(len(some))
        writer.finalize()


def _some(rows: Iterator[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return the next ``count`` rows, or fewer if they are long."""
    taken = []
    characters = 0
    for row in islice(rows, count):
        taken.append(row)
        characters += _characters(row)
        if characters > AT_ONCE:
            break
    return taken


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return sum(map(_characters, inside))
