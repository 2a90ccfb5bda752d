"""Check the format of a conversation's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEEDED = ("role", "content")


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
