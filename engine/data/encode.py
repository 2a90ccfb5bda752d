"""Encoders: turn rows of a data set into columns of token ids and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from weft.engine.data.documents import document_key
from weft.engine.data.tokenizer import tokenizer_sha256

Columns = dict[str, list[Any]]
"""``input_ids`` and, if they differ, ``labels``; ``length``, ``key`` and ``truncated`` of each row."""


class Encoder(Protocol):
    """Turns the fields of a row into tokens; a pure function of the row."""

    fields: tuple[str, ...]
    """Fields of the row to read."""
    unit: str
    """Name of a row in messages."""
    sha256: str
    """Hex hash of everything that affects the result; names the cache."""

    def value_of(self, row: Mapping[str, Any]) -> Any:
        """What a row says, to be encoded."""

    def __call__(self, values: Sequence[Any], numbers: Sequence[int]) -> Columns:
        """Encode the ``values`` of rows ``numbers`` of the source (from 0)."""


class TextEncoder:
    """Encodes plain documents: the tokenizer's ids, plus its end-of-text token if it has one."""

    unit = "documents"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, field: str, *, limit: int | None = None) -> None:
        """Encode ``field`` of each row, truncated to ``limit`` tokens (None means no limit)."""
        self.fields: tuple[str, ...] = (field,)
        self.sha256 = hashlib.sha256(f"text 2 {field!r} {limit} {tokenizer_sha256(tokenizer)}".encode()).hexdigest()
        self._tokenizer, self._limit = tokenizer, limit

    def value_of(self, row: Mapping[str, Any]) -> Any:
        """The text of a row."""
        return row.get(self.fields[0])

    def __call__(self, values: Sequence[Any], numbers: Sequence[int]) -> Columns:
        """Encode texts; an empty one gets no tokens.

        Raises:
            ValueError: a value is not a string.
        """
        for number, value in zip(numbers, values, strict=True):
            if not isinstance(value, str):
                raise ValueError(
                    f"data.text_field={self.fields[0]}: row {number + 1} holds {type(value).__name__}, not text; "
                    "remove the row or choose another field"
                )
        rows = self._tokenizer(list(values), add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
        closed = [self._close(ids) if text else [] for ids, text in zip(rows, values, strict=True)]
        cut = [ids[: self._limit] for ids in closed]
        return {
            "input_ids": cut,
            "length": [len(ids) for ids in cut],
            "key": [document_key(ids) for ids in closed],
            "truncated": [len(ids) > len(kept) for ids, kept in zip(closed, cut, strict=True)],
        }

    def _close(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]
