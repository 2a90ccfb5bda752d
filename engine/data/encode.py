"""Encoding of rows as columns of token ids and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from weft.engine.data.documents import document_key, text_key
from weft.engine.data.messages import kind_of
from weft.engine.data.tokenizer import tokenizer_sha256
from weft.engine.data.tokens import WINDOW, tokens_of

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
        self.sha256 = hashlib.sha256(f"text 4 {field!r} {limit} {tokenizer_sha256(tokenizer)}".encode()).hexdigest()
        self._tokenizer, self._limit = tokenizer, limit
        self._around = SpecialTokens.of(tokenizer)

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
                    f"data.text_field={self.fields[0]}: row {number + 1} holds {kind_of(value)}, not text; "
                    "remove the row or choose another field"
                )
        columns: Columns = {"input_ids": [], "length": [], "key": [], "truncated": []}
        for text, tokens in zip(values, tokens_of(self._tokenizer, list(values), limit=self._limit), strict=True):
            around = self._around.closed if tokens.complete else self._around.opened  # truncated texts have no end
            ids = around(tokens.ids) if text else []
            columns["input_ids"].append(ids[: self._limit])
            columns["length"].append(len(columns["input_ids"][-1]))
            columns["key"].append(document_key(ids) if len(text) <= WINDOW else text_key(text))
            columns["truncated"].append(len(ids) > columns["length"][-1])
        return columns


class SpecialTokens(NamedTuple):
    """The special tokens before and after a document: the tokenizer's own, and an end-of-text token.

    Tokens that a document has itself are not repeated.
    """

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        """Return the special tokens of a tokenizer."""
        bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        at = next((n for n in range(len(whole)) if bare and whole[n : n + len(bare)] == bare), None)
        before, after = ([], []) if at is None else (whole[:at], whole[at + len(bare) :])
        end = tokenizer.eos_token_id
        return cls(before, after if end is None or end in after else [*after, end])

    def opened(self, ids: list[int]) -> list[int]:
        """Return a document's tokens with the special tokens before them."""
        return ids if ids[:1] == self.before[:1] else self.before[: len(self.before) - _overlap(self.before, ids)] + ids

    def closed(self, ids: list[int]) -> list[int]:
        """Return a document's tokens with the special tokens around them."""
        return self.opened(ids) + ([] if ids[-1:] == self.after[-1:] else self.after[_overlap(ids, self.after) :])


def _overlap(first: list[int], second: list[int]) -> int:
    """Return the number of tokens with which one list ends and the other begins."""
    longest = min(len(first), len(second))
    return next((n for n in range(longest, 0, -1) if first[len(first) - n :] == second[:n]), 0)
