"""Conversations as data sets write them, as one list of messages with role and content."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weft.conf.schema import DataConfig

_NEEDED = ("role", "content")
_SHAREGPT = ("from", "value")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatbot": "assistant"}
"""What ShareGPT's ``from`` calls a role; other names stay."""
PROMPTED = ("prompt", "completion")
INSTRUCTED = ("instruction", "output")
FORMS = "messages; conversations; prompt and completion; or instruction, input and output"
"""The columns that a chat data set may have, for messages to people."""


def chat_columns(names: Collection[str], field: str) -> tuple[str, ...]:
    """The columns of a row that hold its conversation: ``field``, or unless it was set another known form's.

    Args:
        names: columns that the data set has.
        field: ``data.messages_field``.

    Returns:
        an empty tuple if there is no conversation.
    """
    if field in names:
        return (field,)
    if field != DataConfig.messages_field:
        return ()
    if "conversations" in names:
        return ("conversations",)
    for form in (PROMPTED, INSTRUCTED):
        if set(form) <= set(names):
            return (*form, "input") if form is INSTRUCTED and "input" in names else form
    return ()


def messages_of(row: Mapping[str, Any], columns: tuple[str, ...]) -> Any:
    """What the ``columns`` of a row say, as a list of messages where it can be read as one.

    Prompt and completion are texts, or lists of messages. An instruction is followed by its input, if it
    has one. What is malformed is returned as it is, for `message_fault` to name.
    """
    if len(columns) == 1:
        return _with_roles(row.get(columns[0]))
    asked, answer = (row.get(name) for name in columns[:2])
    if more := row.get("input") if "input" in columns else None:
        asked = f"{asked}\n\n{more}"
    if isinstance(asked, list) and isinstance(answer, list):
        return _with_roles([*asked, *answer])
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _with_roles(messages: Any) -> Any:
    """Messages of ``from`` and ``value`` as ones of role and content."""
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        return messages
    return [
        {"role": ROLES.get(each["from"], each["from"]), "content": each["value"]}
        if all(isinstance(each.get(name), str) for name in _SHAREGPT) and not any(each.get(n) for n in _NEEDED)
        else each
        for each in messages
    ]


def message_fault(messages: Any) -> str | None:
    """Why ``messages`` is not a conversation to train on, and the remedy; None if it is one."""
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else _kind(messages)
        return f"it holds {found}; give a list of messages such as {{'role': 'user', 'content': '...'}}"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            return f"message {number} is {_kind(message)}; give a mapping with role and content"
        missing = [name for name in _NEEDED if message.get(name) is None]
        if missing:
            return (
                f"message {number} has {', '.join(message) or 'nothing'}, not {' and '.join(missing)}; "
                "name its parts role and content"
            )
        for name in _NEEDED:
            if not isinstance(message[name], str):
                return f"message {number} has a {name} that is {_kind(message[name])}; give plain text"
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        return f"no message has the role assistant (found: {roles}), so nothing can be learnt; rename or remove"
    return None


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "a mapping", str: "a text", type(None): "nothing (null)", bool: "a truth value"}
    return names.get(type(value), f"a {type(value).__name__}")
