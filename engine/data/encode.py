"""Encoding of rows as columns of token ids and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from weft.engine.data.documents import document_key, text_key
from weft.engine.data.tokenizer import tokenizer_sha256
from weft.engine.data.tokens import WINDOW, Tokens, tokens_of

Columns = dict[str, list[Any]]
"""Columns of encoded rows: ``input_ids``, ``labels`` if they differ, ``length``, ``key`` and ``truncated``."""


class Encoder(Protocol):
    """Converts rows into tokens. The result depends only on the row."""

    fields: tuple[str, ...]
    """Names of the columns to read."""
    unit: str
    """Plural name of rows in messages."""
    sha256: str
    """Hex hash of everything that affects the result, and that names its cache file."""

    def value_of(self, row: Mapping[str, Any]) -> Any:
        """Return the value of a row to encode."""

    def __call__(self, values: Sequence[Any], numbers: Sequence[int]) -> Columns:
        """Encode the ``values`` of the rows with these ``numbers``, which count the source's rows from 0."""


class TextEncoder:
    """Encodes plain documents with the tokenizer's special tokens, and an end-of-text token if the tokenizer has
    one.
    """

    unit = "documents"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, field: str, *, limit: int | None = None) -> None:
        """Encode ``field`` of each row, truncated to ``limit`` tokens (None means no limit)."""
        self.fields: tuple[str, ...] = (field,)
        self.sha256 = hashlib.sha256(f"text 3 {field!r} {limit} {tokenizer_sha256(tokenizer)}".encode()).hexdigest()
        self._tokenizer, self._limit = tokenizer, limit
        self._around = _around(tokenizer)

    def value_of(self, row: Mapping[str, Any]) -> Any:
        """Return the text of a row, or None if it has none."""
        return row.get(self.fields[0])

    def __call__(self, values: Sequence[Any], numbers: Sequence[int]) -> Columns:
        """Encode texts. An empty text gets no tokens.

        Raises:
            ValueError: a value is not a string.
        """
        for number, value in zip(numbers, values, strict=True):
            if not isinstance(value, str):
                raise ValueError(
                    f"data.text_field={self.fields[0]}: row {number + 1} holds {type(value).__name__}, not text; "
                    "remove the row or choose another field"
                )
        columns: Columns = {"input_ids": [], "length": [], "key": [], "truncated": []}
        for text, tokens in zip(values, tokens_of(self._tokenizer, list(values), limit=self._limit), strict=True):
            ids = self._closed(tokens) if text else []
            columns["input_ids"].append(ids[: self._limit])
            columns["length"].append(len(columns["input_ids"][-1]))
            columns["key"].append(document_key(ids) if len(text) <= WINDOW else text_key(text))
            columns["truncated"].append(len(ids) > columns["length"][-1])
        return columns

    def _closed(self, tokens: Tokens) -> list[int]:
        """Return a text's tokens with the tokenizer's special tokens around them.

        Tokens that the text has itself are not repeated. Truncated texts get none at the end.
        """
        before, after = self._around
        ids = tokens.ids if tokens.ids[: len(before)] == before else before + tokens.ids
        return ids if not tokens.complete or (after and ids[-len(after) :] == after) else ids + after


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a document: the tokenizer's own, and an end-of-text token."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    at = next((n for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare), None)
    if at is None:
        return [], [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    before, after = whole[:at], whole[at + len(bare) :]
    end = tokenizer.eos_token_id
    return before, after if end is None or after[-1:] == [end] else [*after, end]
