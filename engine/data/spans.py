"""Assistant spans: the characters of a rendered conversation that the assistant wrote."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from threading import Lock

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Message = Mapping[str, str]
"""``role`` and ``content``."""
Span = tuple[int, int]
"""Start and end (exclusive) character."""

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "\ue000\ue001\ue002"
"""Marker to find where a message's content starts and ends: private-use characters are never trimmed."""

_ONE_AT_A_TIME = Lock()
"""transformers shares compiled templates between threads, but their recording of spans is not thread-safe."""


class NotJinja(Exception):
    """A text is no Jinja template."""


class ChatTemplate:
    """A Jinja chat template, with the special tokens that it may use."""

    def __init__(self, template: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Render ``template`` as ``tokenizer.apply_chat_template`` would.

        Raises:
            NotJinja: the template cannot be compiled.
        """
        self.template = template
        self._special = dict(tokenizer.special_tokens_map)
        with suppress(ValueError):  # a template may refuse a conversation without messages
            self._text([])

    @cached_property
    def has_tags(self) -> bool:
        """Whether the template marks the assistant's text with generation tags."""
        return _TAG.search(self.template) is not None

    def render(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Render a conversation; returns the text and the assistant's spans in order.

        Each span starts where generation would start, and includes the end of the turn.

        Raises:
            ValueError: the template refuses the messages, or does not show where a turn begins.
        """
        if self.has_tags:
            texts, spans = self._jinja(messages, return_assistant_tokens_mask=True)
            return texts[0], [(start, end) for start, end in spans[0] if end > start]
        text = self._text(messages)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._span(text, messages, turn) for turn in turns]

    def _span(self, text: str, messages: Sequence[Message], turn: int) -> Span:
        """Find the span of one turn by comparing renderings.

        Markers before and after the content show its position in the text. The turn starts there, or
        earlier, where its generation prompt stops matching the text: templates may open reasoning in a
        prompt and drop it from history. The text after the marker, in a conversation that ends with
        this turn, closes the turn.
        """
        own = messages[turn]["content"]
        start = _agreement(text, self._text(_with_content(messages, turn, _MARK + own)))
        end = _agreement(text, self._text(_with_content(messages, turn, own + _MARK)))
        alone = self._text(_with_content(messages[: turn + 1], turn, own + _MARK))
        known = _MARK in alone
        if turn:  # templates may refuse an empty conversation
            before = self._text(messages[:turn])
            prompt = self._text(messages[:turn], add_generation_prompt=True)
            asked = _agreement(text, prompt)
            known &= asked > len(before) or before == prompt
            start = min(start, asked)
        if not known or start > end:
            raise ValueError(
                f"message {turn + 1}: the chat template does not show where this assistant turn begins and ends; "
                "mark it in data.chat_template with {% generation %} and {% endgeneration %}"
            )
        return start, end + _agreement(text[end:], alone.rpartition(_MARK)[2])

    def _text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self._jinja(messages, add_generation_prompt=add_generation_prompt)[0][0]

    def _jinja(self, messages: Sequence[Message], **options: bool) -> tuple[list[str], list[list[Span]]]:
        try:
            with _ONE_AT_A_TIME:
                return render_jinja_template([list(messages)], chat_template=self.template, **options, **self._special)
        except TemplateSyntaxError as error:
            raise NotJinja(f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # any: a template is a program of its author's
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the conversation: {reason or type(error).__name__}") from error


def _with_content(messages: Sequence[Message], turn: int, content: str) -> list[Message]:
    return [*messages[:turn], {**messages[turn], "content": content}, *messages[turn + 1 :]]


def _agreement(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[: at + 1] != other[: at + 1])
