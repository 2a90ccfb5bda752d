"""Assistant spans: the character ranges of a rendered conversation that the assistant wrote."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from threading import Lock
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from weft.engine.data.marks import Marks, Message, place_marks
from weft.engine.data.messages import CALLS, is_call, is_parts
from weft.engine.data.sandbox import install, limited

Span = tuple[int, int]
"""Start and end (exclusive) of a range of characters."""
Tools = Sequence[Any] | None
"""Schemas of the functions that a conversation may call, or None."""

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ONE_AT_A_TIME = Lock()
"""Lock for rendering: transformers shares compiled templates between threads, but records spans in them."""


class NotJinja(Exception):
    """Error of a text that is not a Jinja template."""


class ChatTemplate:
    """A Jinja chat template with a tokenizer's special tokens."""

    def __init__(self, template: str, tokenizer: PreTrainedTokenizerBase, *, now: datetime | None = None) -> None:
        """Prepare to render ``template`` as ``tokenizer.apply_chat_template`` would.

        Args:
            now: the time that a template's ``strftime_now`` shows. None means the time of each call.

        Raises:
            NotJinja: the template cannot be compiled.
        """
        install()
        self.template = template
        self.added_tokens = tokenizer.get_added_vocab()
        self._tokenizer = tokenizer
        self._variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        if now is not None:
            self._variables["strftime_now"] = now.strftime
        with suppress(ValueError):  # a template may refuse a conversation without messages
            self.text([])

    @cached_property
    def has_tags(self) -> bool:
        """True if the template marks the assistant's text with generation tags."""
        return _TAG.search(self.template) is not None

    def render(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[Span]]:
        """Render a conversation. Return the text and the assistant's spans in order.

        Raises:
            ValueError: see `text` and `spans`.
        """
        text = self.text(messages, tools)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return text, self.spans(messages, tools, text, encoded["offset_mapping"])

    def text(self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """Render a conversation as text. ``add_generation_prompt`` appends the beginning of an assistant's turn.

        Raises:
            ValueError: the template rejects the messages.
        """
        return self._jinja(messages, tools, add_generation_prompt=add_generation_prompt)[0][0]

    def hidden(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the numbers of the messages that have a content which the template does not show.

        Raises:
            ValueError: the template rejects the messages.
        """
        marks = place_marks(messages, self.text(messages, tools), lambda marked: self.text(marked, tools))
        shown = {number for number, _ in marks.positions(self.text(marks.put(messages), tools))}
        places = [place for number, place in enumerate(marks.places) if number not in shown]
        return [message for message, path in places if path[0] == "content" and messages[message]["content"]]

    def require_shown(self, messages: Sequence[Message], tools: Tools) -> None:
        """Check that the template shows contents in parts, and calls without a content.

        Raises:
            ValueError: it does not, or rejects the messages.
        """
        self._require_parts_read(messages, tools)
        calls = [n for n, message in enumerate(messages) if is_call(message) and not message.get("content")]
        if not calls:
            return
        text, bare = self.text(messages, tools), None
        with suppress(ValueError):  # a template may refuse messages without their calls
            bare = self.text([{k: v for k, v in message.items() if k not in CALLS} for message in messages], tools)
        if text == bare:
            raise ValueError(
                f"message {calls[0] + 1} has {' or '.join(CALLS)} and no content, and the chat template does not show "
                "them; set data.chat_template to one that does"
            )

    def _require_parts_read(self, messages: Sequence[Message], tools: Tools) -> None:
        """Check that the template shows contents in parts, unless it does not show them as plain text either.

        Raises:
            ValueError: it refuses them, leaves one out, or prints it as a list of Python.
        """
        given = {n: message["content"] for n, message in enumerate(messages) if is_parts(message.get("content"))}
        if not given:
            return
        plain = [
            {**message, "content": "".join(part["text"] for part in given[n])} if n in given else message
            for n, message in enumerate(messages)
        ]
        try:
            shown = given.keys() - self.hidden(plain, tools)
        except ValueError:
            return  # a template may read nothing but parts
        try:
            text, hidden = self.text(messages, tools), self.hidden(messages, tools)
            lost = [n for n in sorted(shown) if n in hidden or str(given[n]) in text]
        except ValueError:
            lost = sorted(shown)
        if lost:
            raise ValueError(
                f"message {lost[0] + 1} has its content in parts, which the chat template does not read; give plain "
                "text, or set data.chat_template to one that reads parts"
            )

    def spans(
        self,
        messages: Sequence[Message],
        tools: Tools,
        text: str,
        tokens: Sequence[Span],
        learnt: Collection[int] | None = None,
    ) -> list[Span]:
        """Find the assistant's spans in ``text``, the result of `text` for the same conversation.

        Each span starts where generation would start, and includes the end of the turn. It ends at the end of a token,
        unless the template has generation tags.

        Args:
            tokens: character range of each token. Text after the last token is not searched.
            learnt: numbers of the assistant's messages whose spans are wanted. None means all.

        Raises:
            ValueError: the template does not show where a turn begins or ends.
        """
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = answers if learnt is None else learnt
        if self.has_tags:
            return [(start, end) for start, end in self._tags_of(answers, wanted, messages, tools) if end > start]
        return list(_Turns(self, messages, tools, text, tokens).spans(wanted))

    def _tags_of(
        self, answers: Sequence[int], wanted: Collection[int], messages: Sequence[Message], tools: Tools
    ) -> list[Span]:
        """Return the ranges between generation tags of the ``wanted`` ones of the assistant's messages, ``answers``.

        A message has the ranges that are there when the conversation ends with it, and not with the answer before.
        """
        ranges = self._tagged(messages, tools)
        if len(wanted) == len(answers):
            return ranges
        found, first = list[Span](), 0
        for number in answers:
            is_last = number == answers[-1]
            end = len(ranges) if is_last else len(self._tagged(messages[: number + 1], tools))
            if not first + (number in wanted) <= end <= len(ranges):
                raise ValueError(
                    f"message {number + 1}: the chat template marks other turns with {{% generation %}} if more "
                    "messages follow, so that single messages cannot be left out of the loss; correct it"
                )
            found += ranges[first:end] if number in wanted else []
            first = end
        return found

    def _tagged(self, messages: Sequence[Message], tools: Tools) -> list[Span]:
        """Return the ranges of characters between generation tags."""
        return self._jinja(messages, tools, return_assistant_tokens_mask=True)[1][0]

    def _jinja(self, messages: Sequence[Message], tools: Tools, **options: bool) -> tuple[list[str], list[list[Span]]]:
        try:
            with _ONE_AT_A_TIME, limited(len(str(messages)) + len(str(tools))):
                return render_jinja_template(
                    [list(messages)], tools=tools, chat_template=self.template, **options, **self._variables
                )
        except TemplateSyntaxError as error:
            raise NotJinja(f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # any: a template is a program of its author's
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the conversation: {reason or type(error).__name__}") from error


class _Turns:
    """Finds the assistant's turns of one conversation by comparing renderings.

    Marks in the messages show where the template puts each of them. Only the text after a mark is compared, because
    templates may render the text before it differently in another conversation. For example, they drop the reasoning of
    earlier turns, or move the system's message and the tools to the last question.
    """

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, tokens: Sequence[Span]
    ) -> None:
        self._template, self._messages, self._tools, self._text = template, messages, tools, text
        self._tokens = tokens
        self._ends = [end for _, end in tokens]
        self._rendered: dict[tuple[int, bool], str | None] = {}
        self._marks: Marks = place_marks(messages, text, lambda marked: template.text(marked, tools))
        positions = self._marks.positions(template.text(self._marks.put(messages), tools))
        self._first: dict[int, int] = {}
        """Position at which the first marked text of each message starts."""
        self._last: dict[int, tuple[int, int]] = {}
        """Position at which the last marked text of each message ends, and the number of its mark."""
        for (number, side), at in positions.items():
            message, _ = self._marks.places[number]
            if side == "a":
                self._first[message] = min(at, self._first.get(message, at))
            else:
                self._last[message] = max((at, number), self._last.get(message, (at, number)))

    def spans(self, turns: Collection[int]) -> Iterator[Span]:
        """Yield the span of each of the assistant's ``turns``, in ascending order, that begins among the tokens."""
        until = self._ends[-1] if self._ends else 0
        for turn in turns:
            self._rendered.clear()
            start = self._start(turn)
            if start is not None and start >= until:
                return
            end = None if start is None else self._end(turn, start)
            others = (at for message, at in self._first.items() if message != turn)
            if start is None or end is None or end < start or any(start <= at < end for at in others):
                raise ValueError(
                    f"message {turn + 1}: the chat template does not show where this assistant turn begins and "
                    "ends; mark it in data.chat_template with {% generation %} and {% endgeneration %}"
                )
            yield start, end

    def _start(self, turn: int) -> int | None:
        """Return the position at which generation of a turn would start, or None if it is unknown.

        This is where the generation prompt stops matching the text, because a template may begin reasoning in the
        prompt and drop it from history. It is not after the beginning of the turn's own text.
        """
        first = self._first.get(turn)
        base, number = self._before(turn)
        prompt = self._after(turn, number, add_generation_prompt=True)
        if prompt is None:
            return 0 if first is None and not turn else first
        shared = _agreement(prompt, self._after(turn, number) or "")
        agreed = _agreement(self._text[base : base + len(prompt)], prompt)
        if number is None and first and agreed < len(prompt):  # a template may begin with more if there are messages
            prompt, shared = prompt[shared:], 0
            agreed, base = max((_agreement(self._text[at : at + len(prompt)], prompt), at) for at in range(first))
        if agreed <= shared < len(prompt):
            return None
        start = base + agreed
        if agreed < len(prompt):
            start = self._word_start(base + shared, start)
        return start if first is None else min(first, start)

    def _word_start(self, least: int, at: int) -> int:
        """Return the last position up to ``at`` that follows white space or an added token, or ``least``.

        A prompt's <think> and a text's <tool_call> differ from their beginning, not from their third character.
        """
        token = bisect_right(self._ends, at)
        while token and self._ends[token - 1] > least:
            start, end = self._tokens[token - 1]
            if self._text[end - 1].isspace() or self._text[start:end] in self._template.added_tokens:
                return end
            token -= 1
        return least

    def _end(self, turn: int, start: int) -> int | None:
        """Return the end of a turn that begins at ``start``, or None if it is unknown.

        After its own text, the turn continues as long as one of two other renderings agrees: the conversation that ends
        with this turn, or that continues with another prompt. Both are needed, because templates may close the last
        turn differently.
        """
        if turn not in self._last and any(_is_shown(v) for key, v in self._messages[turn].items() if key != "role"):
            return None
        base, number = self._before(turn + 1)
        if turn == len(self._messages) - 1:
            return len(self._text)
        asked = self._after(turn + 1, number, add_generation_prompt=True) or ""
        closed = next((asked.removesuffix(prompt) for prompt in self._prompts(turn) if asked.endswith(prompt)), None)
        known = [each for each in (self._after(turn + 1, number), closed) if each is not None]
        if not known:
            return None
        end = base + max(_agreement(self._text[base : base + len(each)], each) for each in known)
        token = bisect_right(self._ends, end)
        straddling = self._tokens[token][0] if token < len(self._tokens) else end
        return straddling if max(base, start) <= straddling < end else end

    def _prompts(self, turn: int) -> Iterator[str]:
        """Yield the texts that the template adds to request an answer to the nearest questions.

        After an answer it may add more, to close it.
        """
        answered = {n + 1 for n, message in enumerate(self._messages) if message["role"] == "assistant"}
        counts = [count for count in range(len(self._messages)) if count not in answered]
        for count in sorted(counts, key=lambda count: abs(count - turn))[:3]:
            _, number = self._before(count)
            prompt, plain = self._after(count, number, add_generation_prompt=True), self._after(count, number)
            if prompt is not None and plain is not None and (text := prompt[_agreement(prompt, plain) :]):
                yield text

    def _before(self, turn: int) -> tuple[int, int | None]:
        """Return the end of the last marked text before a turn, and its mark's number.

        Return (0, None) if no text before the turn is marked.
        """
        earlier = [message for message in self._last if message < turn]
        return self._last[max(earlier)] if earlier else (0, None)

    def _after(self, count: int, number: int | None, *, add_generation_prompt: bool = False) -> str | None:
        """Render the first ``count`` messages, and return the text after mark ``number``, or all of it for None.

        Return None if the template rejects the messages or does not show the mark.
        """
        key = (count, add_generation_prompt)
        if key not in self._rendered:
            marked = self._marks.put(self._messages[:count])
            self._rendered[key] = None
            with suppress(ValueError):  # a template may refuse the beginning of a conversation
                self._rendered[key] = self._template.text(
                    marked, self._tools, add_generation_prompt=add_generation_prompt
                )
        if (rendered := self._rendered[key]) is None:
            return None
        return self._marks.removed(rendered) if number is None else self._marks.after(rendered, number)


def _is_shown(value: Any) -> bool:
    """True if a template would write something for a value."""
    return bool(value.strip() if isinstance(value, str) else value)


def _agreement(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[: at + 1] != other[: at + 1])
