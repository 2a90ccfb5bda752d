"""Chat encoding: conversations as tokens, with labels only on the assistant's tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from weft.conf.host.documents import read_text
from weft.engine.data.documents import IGNORED, document_key, text_key
from weft.engine.data.encode import Columns
from weft.engine.data.messages import Conversation, conversation_fault
from weft.engine.data.spans import ChatTemplate, NotJinja, Span
from weft.engine.data.tokenizer import tokenizer_sha256
from weft.engine.data.tokens import WINDOW, Tokens, tokens_of

T = TypeVar("T")
_MOST_BYTES = 2**20
TEMPLATES = ("default", "tool_use")
"""Names of the templates without and with tools, in a tokenizer with several templates."""


class ChatEncoder:
    """Encoder that renders conversations with a chat template, and labels the assistant's turns and their end
    tokens.
    """

    unit = "conversations"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fields: tuple[str, ...],
        *,
        template: str,
        limit: int,
        now: datetime | None = None,
    ) -> None:
        """Load the chat templates.

        Args:
            fields: columns that contain the conversation, from `chat_columns`.
            template: Jinja text, or a file with it. An empty string uses the tokenizer's template.
            limit: truncate conversations to this many tokens.
            now: the time that a template may show. None means the current time.

        Raises:
            ValueError: there is no template, it is not valid Jinja, or the tokenizer does not map tokens to characters.
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"model.tokenizer={tokenizer.name_or_path}: data.kind=chat needs token offsets, which "
                f"{type(tokenizer).__name__} does not provide; use a tokenizer with a tokenizer.json"
            )
        self.fields = fields
        self._tokenizer = tokenizer
        try:
            plain, tool_use = (
                ChatTemplate(find_template(tokenizer, template, name), tokenizer, now=now) for name in TEMPLATES
            )
        except NotJinja as error:
            whose = template or f"'': that of the tokenizer {tokenizer.name_or_path}"
            raise ValueError(f"data.chat_template={whose}: not a Jinja template ({error}); correct it") from error
        self._templates = {False: plain, True: tool_use}
        """Templates, by whether a conversation has tools."""
        self._limit = limit
        texts = sorted({plain.template, tool_use.template})
        shown = now if any("strftime_now" in text for text in texts) else None
        parts = ("chat 8", fields, tokenizer_sha256(tokenizer), texts, limit, shown)
        self.sha256 = hashlib.sha256(repr(parts).encode()).hexdigest()

    def value_of(self, row: Mapping[str, Any]) -> Conversation:
        """Return the conversation of a row, in any of the supported forms."""
        return Conversation.of(row, self.fields)

    def __call__(self, values: Sequence[Any], numbers: Sequence[int]) -> Columns:
        """Encode conversations, or lists of messages.

        A conversation without assistant tokens before the limit gets no tokens.

        Raises:
            ValueError: a row is not a conversation, or has no assistant token. The message names the row.
        """
        talks = [value if isinstance(value, Conversation) else Conversation(value) for value in values]
        texts = [self._named(number, self.text, talk) for talk, number in zip(talks, numbers, strict=True)]
        columns: Columns = {"input_ids": [], "labels": [], "length": [], "key": [], "truncated": []}
        encoded = tokens_of(self._tokenizer, texts, limit=self._limit, spans=True)
        for number, talk, text, tokens in zip(numbers, talks, texts, encoded, strict=True):
            labels = self._named(number, self._labels, talk, text, tokens)
            kept = len(labels) if any(token != IGNORED for token in labels[1:]) else 0
            columns["input_ids"].append(tokens.ids[:kept])
            columns["labels"].append(labels[:kept])
            columns["length"].append(len(columns["input_ids"][-1]))
            columns["key"].append(document_key(tokens.ids) if len(text) <= WINDOW else text_key(text))
            columns["truncated"].append(len(tokens.ids) > self._limit)
        return columns

    def text(self, talk: Conversation) -> str:
        """Render a conversation with the template.

        Raises:
            ValueError: the conversation is malformed, or the template rejects it or does not show its tool calls.
        """
        if fault := conversation_fault(talk):
            raise ValueError(fault)
        self._templates[talk.tools is not None].require_shown(talk.messages, talk.tools)
        return self.rendered(talk)

    def rendered(self, talk: Conversation) -> str:
        """Render a conversation, without checking that its tool calls appear.

        Raises:
            ValueError: the template rejects the conversation.
        """
        return self._templates[talk.tools is not None].text(talk.messages, talk.tools)

    def hidden(self, talk: Conversation) -> list[int]:
        """Return the numbers of the messages that have a content which the template does not show.

        Raises:
            ValueError: the template rejects the conversation.
        """
        return self._templates[talk.tools is not None].hidden(talk.messages, talk.tools)

    def _labels(self, talk: Conversation, text: str, tokens: Tokens) -> list[int]:
        """Return the labels of the tokens before the limit."""
        ids, places = tokens.ids[: self._limit], tokens.spans[: self._limit]
        template = self._templates[talk.tools is not None]
        labels = label(ids, places, template.spans(talk.messages, talk.tools, text, places, talk.learnt))
        if len(ids) == len(tokens.ids) and not any(token != IGNORED for token in labels[1:]):
            raise ValueError("it has no assistant token; remove it")
        return labels

    def _named(self, number: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function``. Add the row's number to a `ValueError` that it raises."""
        try:
            return function(*arguments)
        except ValueError as error:
            raise ValueError(self._fault(number, str(error))) from error

    def _fault(self, number: int, what: str) -> str:
        return f"data.messages_field={', '.join(self.fields)}: conversation {number + 1}: {what}"


def label(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Return the labels of tokens: the id if the token overlaps a span, otherwise -100.

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
    """Return the tokenizer to export, which has the chat template of the training data.

    Args:
        given: ``data.chat_template``. An empty string returns the tokenizer itself.
    """
    if not given:
        return tokenizer
    trained = copy(tokenizer)
    trained.chat_template = find_template(tokenizer, given)
    return trained


def find_template(tokenizer: PreTrainedTokenizerBase, given: str, name: str = TEMPLATES[0]) -> str:
    """Return the chat template: ``data.chat_template``, or else the tokenizer's template called ``name``.

    Args:
        given: ``data.chat_template``, a file or Jinja text, or an empty string.
        name: of a tokenizer with several templates. If it has none of that name, its default template is returned.

    Raises:
        ValueError: there is no template, or ``given`` is neither a file nor Jinja.
    """
    if not given:
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get(name) or own.get(TEMPLATES[0])
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
    try:
        return read_text(file, most_bytes=_MOST_BYTES)
    except ValueError as error:
        raise ValueError(f"data.chat_template={given}: {error}") from error
