"""Chat encoding: conversations with labels on the assistant's tokens only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.engine.data.documents import IGNORED, document_key
from weft.engine.data.encode import Columns
from weft.engine.data.messages import message_fault, messages_of
from weft.engine.data.spans import ChatTemplate, NotJinja, Span
from weft.engine.data.tokenizer import tokenizer_sha256


class ChatEncoder:
    """Renders conversations with the chat template; labels the assistant's turns and their closing tokens."""

    unit = "conversations"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, fields: tuple[str, ...], *, template: str, limit: int
    ) -> None:
        """Encode the conversation of each row.

        Args:
            fields: what hold it, as of `chat_columns`.
            template: Jinja text or a file with it; empty uses the tokenizer's.
            limit: truncate conversations to this many tokens.

        Raises:
            ValueError: there is no template, it is no Jinja, or the tokenizer does not map tokens to characters.
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"model.tokenizer={tokenizer.name_or_path}: data.kind=chat needs token offsets, which "
                f"{type(tokenizer).__name__} does not provide; use a tokenizer with a tokenizer.json"
            )
        self.fields = fields
        self._tokenizer = tokenizer
        try:
            self._template = ChatTemplate(find_template(tokenizer, template), tokenizer)
        except NotJinja as error:
            whose = template or f"'': that of the tokenizer {tokenizer.name_or_path}"
            raise ValueError(f"data.chat_template={whose}: not a Jinja template ({error}); correct it") from error
        self._limit = limit
        parts = ("chat 3", fields, tokenizer_sha256(tokenizer), self._template.template, limit)
        self.sha256 = hashlib.sha256(repr(parts).encode()).hexdigest()

    def value_of(self, row: Mapping[str, Any]) -> Any:
        """The messages of a row, whatever its form."""
        return messages_of(row, self.fields)

    def __call__(self, values: Sequence[Any], numbers: Sequence[int]) -> Columns:
        """Encode conversations; one without assistant tokens before the limit gets no tokens.

        Raises:
            ValueError: a row is not a conversation, or has no assistant token; the message names the row.
        """
        rendered = [self._render(value, number) for value, number in zip(values, numbers, strict=True)]
        encoded = self._tokenizer(
            [text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        columns: Columns = {"input_ids": [], "labels": [], "length": [], "key": [], "truncated": []}
        for number, (_, spans), ids, offsets in zip(
            numbers, rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            labels = label(ids, offsets, spans)
            if not any(token != IGNORED for token in labels[1:]):
                raise ValueError(self._fault(number, "it has no assistant token; remove it"))
            kept = self._limit if any(t != IGNORED for t in labels[1 : self._limit]) else 0
            columns["input_ids"].append(ids[:kept])
            columns["labels"].append(labels[:kept])
            columns["length"].append(min(len(ids), kept))
            columns["key"].append(document_key(ids))
            columns["truncated"].append(len(ids) > self._limit)
        return columns

    def _render(self, value: Any, number: int) -> tuple[str, list[Span]]:
        if fault := message_fault(value):
            raise ValueError(self._fault(number, fault))
        try:
            return self._template.render([{name: m[name] for name in ("role", "content")} for m in value])
        except ValueError as error:
            raise ValueError(self._fault(number, str(error))) from error

    def _fault(self, number: int, what: str) -> str:
        return f"data.messages_field={', '.join(self.fields)}: conversation {number + 1}: {what}"


def label(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """The labels of tokens: the id if the token overlaps a span, otherwise -100.

    Args:
        offsets: character range of each token, in ascending order.
        spans: disjoint character ranges, in ascending order.
    """
    labels = [IGNORED] * len(ids)
    upcoming = iter(spans)
    span = next(upcoming, None)
    for position, (start, end) in enumerate(offsets):
        while span is not None and span[1] <= start:
            span = next(upcoming, None)
        if span is None:
            break
        if start < end and end > span[0]:
            labels[position] = ids[position]
    return labels


def with_template(tokenizer: PreTrainedTokenizerBase, given: str) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that a model was trained with: what its export has to have.

    Args:
        given: ``data.chat_template``; empty leaves the tokenizer's own.
    """
    if not given:
        return tokenizer
    trained = copy(tokenizer)
    trained.chat_template = find_template(tokenizer, given)
    return trained


def find_template(tokenizer: PreTrainedTokenizerBase, given: str) -> str:
    """The chat template: ``data.chat_template`` (a file or Jinja text), or else the tokenizer's.

    Raises:
        ValueError: there is no template, or the given one is neither a file nor Jinja.
    """
    if not given:
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        if not own:
            raise ValueError(
                f"data.chat_template='': the tokenizer {tokenizer.name_or_path or 'given'} has no chat template; "
                "set it to a Jinja template or a file with one, or use an instruction-tuned model's tokenizer"
            )
        return own
    if "{%" in given or "{{" in given:
        return given
    file = Path(given).expanduser()
    if not file.is_file():
        raise ValueError(f"data.chat_template={given}: neither a file nor a Jinja template; give one of them")
    return file.read_text(encoding="utf-8")
