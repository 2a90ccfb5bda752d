"""Marks in the texts of messages, which show where a chat template puts each message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

Message = Mapping[str, Any]
"""A message with ``role``, ``content`` and other keys such as ``tool_calls``, ``name`` and ``reasoning_content``."""
Path = tuple[str | int, ...]
"""Keys and indices that lead to a text inside of a message."""

_NEVER = frozenset({"role", "type", "id", "tool_call_id", "name"})
"""Keys that are not marked, because templates compare their values, look them up or limit their length."""


@dataclass(frozen=True)
class Marks:
    """Marks around texts in the messages of one conversation. They leave the rest of the rendering unchanged."""

    tag: str
    places: tuple[tuple[int, Path], ...]
    """Index of the message, and path in the message, of each marked text."""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{self.tag}(\d+)([ae])")

    def put(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with marks in them. ``messages`` may be only the first of those that have marks."""
        marked = list(messages)
        for number, (message, path) in enumerate(self.places):
            if message < len(marked):
                marked[message] = _replaced(marked[message], path, partial(self._around, number))
        return marked

    def _around(self, number: int, text: str) -> str:
        """Add marks around ``text``, but inside of its leading and trailing white space, which templates may trim."""
        body = text.strip()
        at = text.find(body)
        return f"{text[:at]}{self.tag}{number}a{body}{self.tag}{number}e{text[at + len(body) :]}"

    def removed(self, rendered: str) -> str:
        """Return a rendering without its marks."""
        return self._pattern.sub("", rendered)

    def positions(self, rendered: str) -> dict[tuple[int, str], int]:
        """Return the first position of each mark in `removed`, by the mark's number and ``a`` (start) or ``e``
        (end).
        """
        found: dict[tuple[int, str], int] = {}
        length = 0
        for match in self._pattern.finditer(rendered):
            found.setdefault((int(match[1]), match[2]), match.start() - length)
            length += len(match[0])
        return found

    def after(self, rendered: str, number: int) -> str | None:
        """Return the text after the end of a marked text in a rendering, without marks, or None if the mark is
        absent.
        """
        _, found, rest = rendered.partition(f"{self.tag}{number}e")
        return self.removed(rest) if found else None


def place_marks(messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]) -> Marks:
    """Mark each text of the messages whose mark leaves the rest of the rendering unchanged.

    Args:
        text: the rendering of the conversation without marks.
        render: renders the same conversation with other messages.

    Returns:
        Marks for each text whose position in ``text`` is known.
    """
    tag = "qzM"
    while tag in text:
        tag += "z"

    def harmless(places: tuple[tuple[int, Path], ...]) -> bool:
        marks = Marks(tag, places)
        try:
            return marks.removed(render(marks.put(messages))) == text
        except ValueError:  # a template may refuse a marked text
            return False

    def harmless_ones(places: tuple[tuple[int, Path], ...]) -> tuple[tuple[int, Path], ...]:
        if not places or harmless(places):
            return places
        half = len(places) // 2
        return harmless_ones(places[:half]) + harmless_ones(places[half:]) if half else ()

    return Marks(tag, harmless_ones(tuple((n, path) for n, each in enumerate(messages) for path in _texts(each))))


def _texts(message: Message) -> list[Path]:
    """Return the paths of the texts to mark in a message.

    These are each key's last text. If there are none, names count as texts too. If there are still none, it is the
    content, even if it is empty.
    """
    for silent in (_NEVER, _NEVER - {"name"}):
        inside = (path for key, value in message.items() if key not in _NEVER for path in _last(value, silent, (key,)))
        if paths := list(inside):
            return paths
    return [("content",)] if isinstance(message.get("content"), str) else []


def _last(value: Any, silent: frozenset[str], path: Path) -> Iterator[Path]:
    """Yield the path of the last text inside ``value``, if there is one."""
    if isinstance(value, str):
        yield from [path] if value.strip() else []
        return
    items = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value)) if _is_list(value) else []
    for key, inner in reversed(items):
        if key not in silent and (found := next(_last(inner, silent, (*path, key)), None)):
            yield found
            return


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _replaced(value: Any, path: Path, change: Callable[[str], str]) -> Any:
    """Return a copy of ``value`` with ``change`` applied to the text at ``path``."""
    if not path:
        return change(value)
    first, *rest = path
    copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copy[first] = _replaced(value[first], tuple(rest), change)
    return copy
