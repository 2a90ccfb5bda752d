"""Counts or estimates the prompt tokens of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.inference.requests import Refusal

BYTES_PER_TOKEN = 3
"""A conservative estimate for text without a tokenizer."""
MESSAGE_TOKENS = 8
"""Approximate overhead of a chat template per message."""

TEMPLATED = ("tools", "documents", "chat_template_kwargs")
"""Fields of a chat that its template prints, or may print."""

Count = Callable[[str], int]
"""Maps a text to its number of tokens."""


def counter(tokenizer: str) -> Count:
    """Return a function that counts tokens by a tokenizer.json (or its folder), or estimates if the path is empty.

    Raises:
        ValueError: there is no such tokenizer.
    """
    if not tokenizer:
        return lambda text: -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)
    from tokenizers import Tokenizer

    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"inference.controller.tokenizer={tokenizer}: no such file; give a tokenizer.json")
    loaded = Tokenizer.from_file(str(path))
    return lambda text: len(loaded.encode(text))


def prompt_tokens(request: Mapping[str, Any], count: Count) -> int:
    """Return the number of tokens of a completion's or a chat's prompt, before any truncation. It is at least 1.

    Raises:
        Refusal: the prompt is in none of the formats of OpenAI's API.
    """
    limit = request.get("truncate_prompt_tokens")
    tokens = max(1, _all_tokens(request, count))
    return min(tokens, limit) if isinstance(limit, int) and limit > 0 else tokens


def _all_tokens(request: Mapping[str, Any], count: Count) -> int:
    if "messages" not in request:
        return _completion_tokens(request.get("prompt"), count)
    texts = list(_message_texts(request["messages"]))
    templated = [json.dumps(request[name], ensure_ascii=False) for name in TEMPLATED if request.get(name)]
    return sum(map(count, texts + templated)) + MESSAGE_TOKENS * len(texts)


def _completion_tokens(prompt: object, count: Count) -> int:
    if isinstance(prompt, str):
        return count(prompt)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, int) for part in prompt):
            return len(prompt)
        if all(isinstance(part, str | list) for part in prompt):
            return sum(_completion_tokens(part, count) for part in prompt)
    raise Refusal(400, "prompt: give a string, a list of tokens, or a list of those")


def _message_texts(messages: object) -> Iterator[str]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refusal(400, "messages: give a list of {role, content}")
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        text = content if isinstance(content, str) else ""
        # Other fields of a message that a template can print besides its content: tool calls, reasoning, names.
        further = {name: value for name, value in message.items() if name not in ("role", "content") and value}
        yield text + (json.dumps(further, ensure_ascii=False) if further else "")
