"""The begin of a streamed answer: a worker's first token, sent while the decode server fetches the prompt's cache.

The decode server is given the token, so that its answer continues it. Only streams whose first chunk is known without
the decode server begin like this.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.inference.requests import Refusal, depends_on_server

EVENT, EVENT_END = b"data: ", b"\n\n"
_PLAIN = {
    *("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "user"),
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids", "ignore_eos", "return_token_ids", "skip_special_tokens"),
    *("add_special_tokens", "add_generation_prompt", "chat_template_kwargs", "truncate_prompt_tokens"),
    *("cache_salt", "priority"),
}
"""Fields that a worker's request has, too, or that do not change the first chunk."""


def may_begin(value: Mapping[str, Any]) -> bool:
    """True if the first chunk of the answer to a request is the worker's first token and nothing else."""
    given = {name: field for name, field in value.items() if not (field is None or field is False or field == [])}
    options = given.get("stream_options", {})
    return (
        given.get("stream") is True
        and given.keys() <= _PLAIN
        and not depends_on_server(value)  # a worker gets the prompt's tokens alone, without how to sample
        and isinstance(options, dict)
        and options.keys() <= {"include_usage"}
        # Workers do not see these: the decode server alone refuses other types.
        and all(isinstance(flag, bool) for flag in (*options.values(), given.get("return_token_ids", True)))
    )


@dataclass(frozen=True)
class Begin:
    """The first token of an answer.

    Attributes:
        events: the events that a stream begins with.
    """

    token: int
    text: str
    events: bytes

    @classmethod
    def of(cls, value: Mapping[str, Any], prefilled: Mapping[str, Any], token: object, longest: int) -> Begin | None:
        """Return the begin of an answer, or None if the decode server has to begin it.

        Args:
            value: the request, one that `may_begin`.
            prefilled: the worker's response.
            token: the first token that the worker has drawn.
            longest: maximum number of tokens of prompt and answer.
        """
        try:
            return cls._of(value, prefilled, token, longest)
        except (AttributeError, IndexError, KeyError, TypeError):  # another server's response
            return None

    @classmethod
    def _of(cls, value: Mapping[str, Any], prefilled: Mapping[str, Any], token: object, longest: int) -> Begin | None:
        choice, prompt = prefilled["choices"][0], prefilled["usage"]["prompt_tokens"]
        message = choice.get("message")
        text = choice.get("text") if message is None else message.get("content")
        asked = (None if message is None else value.get("max_completion_tokens")) or value.get("max_tokens")
        if choice.get("finish_reason") != "length" or asked == 1:  # the answer ends with its first token
            return None
        if not isinstance(token, int) or not isinstance(text, str) or prompt + (asked or 2) > longest:
            return None
        tokens = choice.get("token_ids") if value.get("return_token_ids") else None
        holder = choice if message is None else prefilled
        prompts = {"prompt_token_ids": holder.get("prompt_token_ids") if tokens else None}
        ends = {"logprobs": None, "finish_reason": None}
        if message is None:
            part = {"index": 0, "text": text} | ends | {"stop_reason": None} | prompts | {"token_ids": tokens}
            return cls(token, text, _event(prefilled, "text_completion", part))
        kind = "chat.completion.chunk"
        role = {"index": 0, "delta": {"role": message["role"], "content": ""}} | ends
        part = {"index": 0, "delta": {"content": text}} | ends | {"token_ids": tokens}
        first = _event(prefilled, kind, role, prompts | {"prompt_text": None})
        return cls(token, text, first + _event(prefilled, kind, part))

    async def rest(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the decode server's events without what this begin has.

        Args:
            stream: parts of whole events.

        Raises:
            Refusal: they do not continue this begin.
        """
        is_begun, created = False, _created(self.events)
        theirs = created
        async for part in stream:
            if is_begun:
                yield part.replace(theirs, created)
                continue
            kept = []
            for event in part.removesuffix(EVENT_END).split(EVENT_END):
                if not is_begun and event.startswith(EVENT + b"{"):
                    theirs = _created(event) or created
                    try:
                        event, is_begun = self._without(event)
                    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                        raise Refusal(502, f"the decode server's answer has another form, {event!r:.80}") from error
                kept.append(event.replace(theirs, created) + EVENT_END if event else b"")
            if left := b"".join(kept):
                yield left
        if not is_begun:
            raise Refusal(502, "the decode server's answer ended before its first token; send the request again")

    def _without(self, event: bytes) -> tuple[bytes, bool]:
        """Return an event without this begin, empty if nothing remains, and True if it contained the first token."""
        chunk = json.loads(event.removeprefix(EVENT))
        if not chunk.get("choices"):  # an error
            return event, True
        choice = chunk["choices"][0]
        holder, field = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        if holder.get("role"):
            return b"", False
        text = holder.get(field) or ""
        if not text.startswith(self.text):
            raise Refusal(502, f"the decode server began with {text!r:.40}, a worker with {self.text!r:.40}")
        is_one = text == self.text and len(choice.get("token_ids") or [self.token]) == 1
        if is_one and choice.get("finish_reason") is None:
            return b"", True
        # The client reads slowly, and vLLM has sent several tokens at once.
        holder[field] = text.removeprefix(self.text)
        if choice.get("token_ids"):
            del choice["token_ids"][0]
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
        return EVENT + _dump(chunk), True


def _event(prefilled: Mapping[str, Any], kind: str, choice: object, more: Mapping[str, Any] | None = None) -> bytes:
    """Return an event with its fields in vLLM's order."""
    head = {"id": prefilled["id"], "object": kind, "created": prefilled["created"], "model": prefilled["model"]}
    return EVENT + _dump(head | {"choices": [choice]} | dict(more or {})) + EVENT_END


def _dump(chunk: Mapping[str, Any]) -> bytes:
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()


def _created(events: bytes) -> bytes:
    """Return the field with the time of an event, which is the same in all of a stream. Text has no bare quotes."""
    found = re.search(rb'"created":\d+', events)
    return found[0] if found else b""
