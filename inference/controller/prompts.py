"""How many tokens a request prefills, as far as can be told without the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.inference.requests import Refusal

BYTES_PER_TOKEN = 3
"""Cautious for text; a tokenizer counts."""
MESSAGE_TOKENS = 8
"""What a chat template puts around a message, about."""

Count = Callable[[str], int]
"""Tokens of a text."""


def counter(tokenizer: str) -> Count:
    """Counts with a tokenizer.json (or a folder with one); estimates if ``tokenizer`` is empty.

    Raises:
        ValueError: there is no such tokenizer.
    """
    if not tokenizer:
        return lambda text: -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)
    from tokenizers import Tokenizer

    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"inference.controller.tokenizer={tokenizer}: there is no such file; give a tokenizer.json")
    loaded = Tokenizer.from_file(str(path))
    return lambda text: len(loaded.encode(text))


def prompt_tokens(request: Mapping[str, Any], count: Count) -> int:
    """Tokens of a completion's or a chat's prompt; at least 1.

    Raises:
        Refusal: there is no prompt in any of the forms that OpenAI's API takes.
    """
    if "messages" in request:
        texts = list(_message_texts(request["messages"]))
        return max(1, sum(map(count, texts)) + MESSAGE_TOKENS * len(texts))
    return max(1, _completion_tokens(request.get("prompt"), count))


def _completion_tokens(prompt: object, count: Count) -> int:
    if isinstance(prompt, str):
        return count(prompt)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, int) for part in prompt):
            return len(prompt)
        if all(isinstance(part, str | list) for part in prompt):
            return sum(_completion_tokens(part, count) for part in prompt)
    raise Refusal(400, "prompt: neither a text nor tokens, nor a list of those; give one")


def _message_texts(messages: object) -> Iterator[str]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refusal(400, "messages: no list of {role, content}; give one")
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        yield content if isinstance(content, str) else ""
