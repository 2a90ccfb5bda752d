"""Preference pairs: a prompt with a chosen and a rejected answer as tokens, as TRL's DPOTrainer makes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from weft.engine.data.chat import TEMPLATES, find_template
from weft.engine.data.documents import IGNORED, Document, document_key
from weft.engine.data.encode import Columns, SpecialTokens
from weft.engine.data.messages import TOOLS, WEIGHT, Conversation, kind_of, message_fault, tools_fault, tools_of
from weft.engine.data.packing import Layout, lay_out_single
from weft.engine.data.spans import ChatTemplate, NotJinja
from weft.engine.data.tokenizer import tokenizer_sha256
from weft.engine.data.tokens import panics_named

ANSWERS = ("chosen", "rejected")
COLUMNS = ("prompt", *ANSWERS)
SECOND = -101
"""Label of the first token of a pair's second sequence, which begins anew and is never predicted."""


class Pair(NamedTuple):
    """A prompt and two answers: texts, or lists of messages."""

    prompt: Any
    chosen: Any
    rejected: Any
    tools: Any = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Pair:
        """Return the pair of a row. Without a prompt of messages, it is what both answers begin with."""
        parts: list[Any] = [row.get(name) for name in COLUMNS]
        prompt, chosen, rejected = parts
        is_within = prompt is None or (isinstance(prompt, str) and isinstance(chosen, list))
        if is_within and isinstance(chosen, str | list) and type(chosen) is type(rejected):
            size = _shared(chosen, rejected)
            if isinstance(chosen, str) and 0 < size < min(len(chosen), len(rejected)) and chosen[size - 1] == " ":
                size -= 1  # tokens begin with their space
            prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        return cls(prompt, chosen, rejected, tools_of(row))

    def texts(self) -> list[Any]:
        """Return the prompt alone, and with each answer."""
        return [self.prompt, *(self.prompt + answer for answer in (self.chosen, self.rejected))]

    def talks(self) -> list[Conversation]:
        """Return the prompt with each answer, if they are messages."""
        return [Conversation(talk, self.tools) for talk in self.texts()[1:]] if isinstance(self.prompt, list) else []


def pair_columns(names: Collection[str]) -> tuple[str, ...]:
    """Return the columns to read of a data set with these columns, or an empty tuple if it has no pairs."""
    return tuple(name for name in COLUMNS if name in names) if set(ANSWERS) <= set(names) else ()


def pair_fault(pair: Pair) -> str | None:
    """Return why a pair cannot be trained on, with the remedy, or None if it can."""
    kinds = {type(part) for part in pair[:3]}
    if len(kinds) > 1 or not kinds <= {str, list}:
        found = ", ".join(f"{name} is {kind_of(part)}" for name, part in zip(COLUMNS, pair, strict=False))
        return f"its {found}; give texts, or lists of messages"
    if isinstance(pair.prompt, str):
        return None
    if not pair.prompt:
        return "its answers begin with different messages, and no prompt; add the column prompt, a list of messages"
    if any(isinstance(each, Mapping) and each.get(WEIGHT) == 0 for answer in pair[1:3] for each in answer):
        return f"a message of an answer has {WEIGHT} 0, but an answer counts as a whole; remove the {WEIGHT}"
    return next(filter(None, map(message_fault, pair.texts()[1:])), None) or tools_fault(pair.tools)


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of elements with which both begin."""
    return sum(1 for _ in takewhile(lambda each: bool(each[0] == each[1]), zip(one, other, strict=False)))


class PairEncoder:
    """Encoder of pairs. A document is the sequence of the chosen answer, then that of the rejected one.

    A prompt and its answer are tokenised together, because tokens may span both. The answers begin where the tokens of
    the three texts differ. Labels are those of the answers.
    """

    unit = "pairs"
    fields: tuple[str, ...] = COLUMNS

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str, limit: int, now: datetime | None = None
    ) -> None:
        """Prepare to encode pairs.

        Args:
            template: chat template of pairs of conversations, as in `ChatEncoder`.
            limit: truncate each sequence to this many tokens.
            now: the time that a template may show.
        """
        self._tokenizer, self._limit, self._given, self._now = tokenizer, limit, template, now
        self._templates: dict[str, ChatTemplate] = {}
        self._around = SpecialTokens.of(tokenizer)
        own = template or json.dumps(tokenizer.chat_template)
        shown = now if "strftime_now" in own else None
        parts = ("pairs 2", tokenizer_sha256(tokenizer), own, limit, shown)
        self.sha256 = hashlib.sha256(repr(parts).encode()).hexdigest()

    def value_of(self, row: Mapping[str, Any]) -> Pair:
        """Return the pair of a row."""
        return Pair.of(row)

    def __call__(self, values: Sequence[Any], numbers: Sequence[int]) -> Columns:
        """Encode pairs. A pair gets no tokens if an answer has none before the limit.

        Raises:
            ValueError: a row is not a pair, or the chat template refuses it. The message names the row.
        """
        columns: Columns = {"input_ids": [], "labels": [], "length": [], "key": [], "truncated": []}
        for number, pair in zip(numbers, values, strict=True):
            try:
                if fault := pair_fault(pair):
                    raise ValueError(fault)
                with panics_named():
                    prompt, *wholes = self._tokens(pair)
            except ValueError as error:
                raise ValueError(f"data.path: pair {number + 1}: {error}") from error
            shared = min(_shared(prompt, whole) for whole in wholes)
            cut = [whole[: self._limit] for whole in wholes]
            labels = [[IGNORED] * shared + ids[shared:] for ids in cut]
            learns = all(any(label != IGNORED for label in each[1:]) for each in labels)
            ids = [*cut[0], *cut[1]] if learns else []
            columns["input_ids"].append(ids)
            columns["labels"].append([*labels[0], SECOND, *labels[1][1:]] if learns else [])
            columns["length"].append(len(ids))
            columns["key"].append(document_key([*wholes[0], *wholes[1]]))
            columns["truncated"].append(any(len(whole) > self._limit for whole in wholes))
        return columns

    def _tokens(self, pair: Pair) -> list[list[int]]:
        """Return the tokens of the prompt, and of the prompt with each answer."""
        if isinstance(pair.prompt, str):
            prompt, *wholes = self._tokenizer(pair.texts(), add_special_tokens=False, verbose=False)["input_ids"]
            return [self._around.opened(prompt), *map(self._around.closed, wholes)]
        template = self._chat_template(TEMPLATES[pair.tools is not None])
        talks = pair.texts()
        for talk in talks[1:]:
            template.require_shown(talk, pair.tools)
        texts = [template.text(talks[0], pair.tools, add_generation_prompt=True)]
        texts += [template.text(talk, pair.tools) for talk in talks[1:]]
        return list(self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])

    def _chat_template(self, name: str) -> ChatTemplate:
        if name not in self._templates:
            try:
                found = find_template(self._tokenizer, self._given, name)
                self._templates[name] = ChatTemplate(found, self._tokenizer, now=self._now)
            except NotJinja as error:
                raise ValueError(f"not a Jinja template ({error}); correct data.chat_template") from error
        return self._templates[name]


def lay_out_pairs(lengths: np.ndarray, sequence_length: int, shuffle: np.random.Generator | None) -> Layout:
    """Lay out one pair of two sequences at a time."""
    return lay_out_single(lengths, 2 * sequence_length, shuffle)


def rows_of(pairs: Sequence[Sequence[Document]]) -> list[list[Document]]:
    """Return the sequences of pairs: first the chosen answers of all, then the rejected ones. Empty pairs fill up."""
    split = [[_parts(pair) for pair in each] for each in pairs]
    return [[parts[side] for parts in each] for side in range(len(ANSWERS)) for each in split]


def _parts(pair: Document) -> tuple[Document, Document]:
    at = int(np.flatnonzero(pair.labels == SECOND)[0])
    return Document(pair.ids[:at], pair.labels[:at]), Document(pair.ids[at:], pair.labels[at:])


PAIR_COLUMNS = (*COLUMNS, TOOLS)
"""All columns from which a pair may be read."""
