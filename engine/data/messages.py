"""Conversations in the forms that data sets use, converted to one list of messages with role and content."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from weft.conf.host.documents import parse_json
from weft.conf.schema import DataConfig

_NEEDED = ("role", "content")
_SHAREGPT = ("from", "value")
ROLES = {"human": "user", "observation": "tool"} | dict.fromkeys(("gpt", "bot", "model", "chatbot"), "assistant")
"""Roles for ShareGPT's names of roles (``from``). Other names are kept."""
CALLER = "function_call"
"""ShareGPT's ``from`` of an assistant's turn whose ``value`` is JSON text with a tool call, or a list of them."""
PROMPTED = ("prompt", "completion")
INSTRUCTED = ("instruction", "output")
FORMS = "messages; conversations; prompt and completion; or instruction, input and output"
"""The forms of chat data sets, as text for error messages."""
TOOLS = "tools"
"""Name of the column with the schemas of functions that an assistant may call."""
CALLS = ("tool_calls", "function_call")
"""Keys of an assistant's message that may replace its content."""
WEIGHT = "weight"
"""Key of a message in OpenAI's format. An assistant's message of weight 0 is not in the loss; of weight 1 it is."""


class Conversation(NamedTuple):
    """The parts of a row that a chat template renders.

    Attributes:
        prompted: number of messages at the beginning that are a prompt, which the loss does not count.
    """

    messages: Any
    tools: Any = None
    prompted: int = 0

    @property
    def learnt(self) -> list[int]:
        """Numbers of the messages that are in the loss."""
        return [number for number, each in enumerate(self.messages) if number >= self.prompted and _is_learnt(each)]

    @classmethod
    def of(cls, row: Mapping[str, Any], columns: tuple[str, ...]) -> Conversation:
        """Return the conversation in the ``columns`` of a row, and its tools."""
        prompt = row.get(columns[0]) if columns[:2] == PROMPTED else None
        return cls(messages_of(row, columns), tools_of(row), len(prompt) if isinstance(prompt, list) else 0)


def chat_columns(names: Collection[str], field: str) -> tuple[str, ...]:
    """Return the columns that contain a row's conversation.

    If the data set has the column ``field``, it is that one. If it does not, and ``field`` is the default, the columns
    of the first other known form are returned.

    Args:
        names: columns that the data set has.
        field: ``data.messages_field``.

    Returns:
        An empty tuple if there is no conversation.
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


def read_columns(field: str) -> tuple[str, ...]:
    """Return all columns from which a row of any form may be read, for ``data.messages_field=field``."""
    return (field, "conversations", *PROMPTED, *INSTRUCTED, "input", TOOLS)


def messages_of(row: Mapping[str, Any], columns: tuple[str, ...]) -> Any:
    """Return the ``columns`` of a row as a list of messages, if they can be read as one.

    Prompt and completion are texts, or lists of messages. An instruction is followed by its input, if it has one.
    Malformed values are returned unchanged, and `message_fault` describes them.
    """
    if len(columns) == 1:
        return _with_roles(row.get(columns[0]))
    asked, answer = (row.get(name) for name in columns[:2])
    if more := row.get("input") if columns[0] == INSTRUCTED[0] else None:
        asked = next((part for part in (asked, more) if not isinstance(part, str)), f"{asked}\n\n{more}")
    if isinstance(asked, list) and isinstance(answer, list):
        return _with_roles([*asked, *answer])
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def tools_of(row: Mapping[str, Any]) -> Any:
    """Return the tools of a row, or None if it has none.

    They are a list of schemas, which may be written as JSON text. Text that is not JSON is returned unchanged.
    """
    tools = row.get(TOOLS)
    if not isinstance(tools, str):
        return tools
    try:
        return parse_json(tools) if tools.strip() else None
    except ValueError:
        return tools  # for `tools_fault` to name


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a typed table without the null values of keys that only other rows have.

    The content of a message stays, because a message that calls tools has a content of null.
    """
    return {name: _compact(value, messages=True) for name, value in row.items()}


def _compact(value: Any, *, messages: bool = False) -> Any:
    if isinstance(value, list):
        return [_compact(each, messages=messages) for each in value]
    if not isinstance(value, Mapping):
        return value
    is_message = messages and {"role", "content"} <= value.keys()
    return {
        name: _compact(each) for name, each in value.items() if each is not None or (is_message and name == "content")
    }


def _with_roles(messages: Any) -> Any:
    """Convert messages with ``from`` and ``value`` to messages with role and content. Return other values unchanged."""
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        return messages
    return [_with_role(each) for each in messages]


def _with_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message.get("from"), str) or "value" not in message or any(message.get(n) for n in _NEEDED):
        return message
    more = {name: value for name, value in message.items() if name not in (*_SHAREGPT, *_NEEDED)}
    if message["from"] == CALLER:
        return {"role": "assistant", "tool_calls": _calls(message["value"]), **more}
    return {"role": ROLES.get(message["from"], message["from"]), "content": message["value"], **more}


def _calls(text: Any) -> list[dict[str, Any]]:
    """Return the tool calls in JSON text, or an empty list if it has none."""
    try:
        found = parse_json(text)
    except (ValueError, TypeError):
        return []
    found = found if isinstance(found, list) else [found]
    is_calls = all(isinstance(each, Mapping) and "name" in each for each in found)
    return [{"type": "function", "function": each} for each in found] if is_calls else []


def message_fault(messages: Any, prompted: int = 0) -> str | None:
    """Return why ``messages`` are not a conversation to train on, with the remedy, or None if they are one.

    The first ``prompted`` messages are a prompt.
    """
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else kind_of(messages)
        return f"it holds {found}; give a list of messages such as {{'role': 'user', 'content': '...'}}"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            return f"message {number} is {kind_of(message)}; give a mapping with role and content"
        needed = ("role",) if is_call(message) and message.get("content") is None else _NEEDED
        missing = [name for name in needed if message.get(name) is None]
        if missing:
            remedy = "name its parts role and content"
            if missing == ["content"] and any(name in message for name in CALLS):
                remedy = f"it calls nothing: give it text, or calls (in ShareGPT's {CALLER}: JSON with a name)"
            elif missing == ["content"] and "content" in message:
                remedy = "its content is null: give it text, or tool_calls, or remove it"
            return f"message {number} has {', '.join(message) or 'nothing'}, not {' and '.join(missing)}; {remedy}"
        for name in needed:
            if not (isinstance(message[name], str) or (name == "content" and is_parts(message[name]))):
                kinds = "text, or a list of parts of type text" if name == "content" else "text"
                return f"message {number} has a {name} that is {kind_of(message[name])}; give {kinds}"
        if fault := _weight_fault(message):
            return f"message {number} has {fault}"
    answers = messages[prompted:]
    if not any(message["role"] == "assistant" for message in answers):
        roles = ", ".join(dict.fromkeys(message["role"] for message in answers)) or "none"
        return f"no message has the role assistant (found: {roles}), so nothing can be learnt; rename or remove"
    if not any(map(_is_learnt, answers)):
        return f"every message of the assistant has {WEIGHT} 0, so nothing can be learnt; remove the row"
    return None


def _is_learnt(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get(WEIGHT) != 0


def _weight_fault(message: Mapping[str, Any]) -> str | None:
    weight = message.get(WEIGHT)
    if weight is None or (weight == 0 and not isinstance(weight, bool)):
        return None
    if weight != 1 or isinstance(weight, bool):
        return f"{WEIGHT} {json.dumps(weight):.40}; give 0 to leave it out of the loss, or 1"
    if message["role"] != "assistant":
        return (
            f"{WEIGHT} 1 and the role {message['role']}, but only the assistant's are in the loss; remove the {WEIGHT}"
        )
    return None


def tools_fault(tools: Any) -> str | None:
    """Return why ``tools`` are not schemas of functions, with the remedy.

    Return None if they are schemas, or if there are no tools.
    """
    if tools is None or (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        return None
    odd = tools if not isinstance(tools, list) else next(each for each in tools if not isinstance(each, dict))
    return f"column {TOOLS} holds {kind_of(odd)}; give a list of JSON schemas, or leave it out"


def conversation_fault(conversation: Conversation) -> str | None:
    """Return why a conversation cannot be trained on, with the remedy, or None if it can."""
    return message_fault(conversation.messages, conversation.prompted) or tools_fault(conversation.tools)


def is_parts(content: Any) -> bool:
    """True for a content of parts, at least one, that are all text, each with ``type`` and ``text``."""
    return (
        bool(content)
        and isinstance(content, list)
        and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    )


def is_silent(message: Mapping[str, Any]) -> bool:
    """True for a message without content, calls or any other value that a chat template may show."""
    content: Any = message.get("content")
    texts = [part["text"] for part in content] if is_parts(content) else [content]
    shown = [value for key, value in message.items() if key not in (*_NEEDED, WEIGHT)]
    return not any(text.strip() if isinstance(text, str) else text for text in (*texts, *shown))


def is_call(message: Mapping[str, Any]) -> bool:
    """True for an assistant's message with tool calls."""
    return message.get("role") == "assistant" and any(message.get(name) for name in CALLS)


def kind_of(value: Any) -> str:
    """Return what a value of a row is, in words."""
    names = {list: "a list", dict: "a mapping", str: "a text", type(None): "nothing (null)", bool: "a truth value"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
