"""Requests and responses of OpenAI's API as a prefill service sees them: valid JSON, prompts only, and complete."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.conf.host.documents import nests_deeper

_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_ENDED = re.compile(rb'"finish_reason"\s*:\s*"|data: {"error"')
_OF_DECODING = ("n", "best_of", "min_tokens", "max_tokens", "max_completion_tokens")
"""Fields that are at most 1 in the part of a request that computes the prompt."""
_OF_ANSWERS = {
    *_OF_DECODING,
    *("stream", "stream_options", "seed", "stop", "stop_token_ids", "echo", "logprobs", "top_logprobs"),
    *("logprob_token_ids", "return_token_ids", "response_format", "structured_outputs", "use_beam_search"),
}
"""Fields that do not concern the prompt, and would cost a worker time, or end the prompt's part early.

Others stay, so that a worker refuses what a decode server would refuse. vLLM's engine ends at a chunked prompt with a
seed on a CPU (0.32.0).
"""
_INNER_FIELDS = {"kv_transfer_params", "ec_transfer_params"}
"""Fields that vLLM merges with `vllm_xargs`, whose values can only be scalars and lists: its connectors expect
objects there, and the engine would end."""

DRAWN, GIVEN = "weft_drawn", "weft_given"
"""Keys of transfer parameters: the first token that a worker has drawn, and the one that a decode server must draw."""
UNSENDABLE = "the key has characters that an HTTP header cannot carry; make one of ASCII letters and digits"


def is_sendable(key: str) -> bool:
    """True if clients can send the API key in a header."""
    return key.isascii() and key.isprintable() and key == key.strip()


class Refusal(Exception):
    """A request that is answered with an HTTP error.

    Attributes:
        status: HTTP status.
        retry_after_s: seconds after which the same request may succeed, or 0 if never.
        field: the field of the body that is wrong, or None.
    """

    def __init__(self, status: int, message: str, *, retry_after_s: int = 0, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.field = field

    @property
    def answer(self) -> dict[str, Any]:
        """Return the response body, in OpenAI's error format."""
        kind = "invalid_request_error" if self.status < 500 else "service_unavailable"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.status}}


def parse(body: bytes, *, max_depth: int) -> dict[str, Any]:
    """Parse ``body`` as a JSON object.

    Raises:
        Refusal: the body is invalid, nested deeper than ``max_depth``, or has text that is not Unicode or a number that
            is not finite.
    """
    if nests_deeper(body, max_depth):
        raise Refusal(400, f"the body is nested deeper than {max_depth} levels")
    try:
        # Not from bytes, because `json` would accept UTF-16, in which `nests_deeper` finds no brackets.
        value = json.loads(body.decode())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        character = ascii(error.object[error.start])
        raise Refusal(400, f"the body contains half of a surrogate pair, {character}; send whole characters") from error
    except ValueError as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    return value


def object_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object that a server has answered, or an empty one if its answer is something else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def models_of(content: bytes) -> list[dict[str, Any]]:
    """Return the models in a server's answer to `/v1/models`."""
    listed = object_of(content).get("data")
    return [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []


def check_prefill_only(value: Mapping[str, Any]) -> None:
    """Refuse a request that this worker would have to decode.

    Raises:
        Refusal: the request needs decoding. The message has a remedy.
    """
    if decodes_elsewhere(value):
        return
    is_chat = "messages" in value and not {"prompt", "prompt_embeds"} & value.keys()
    asked = (value.get("max_completion_tokens") if is_chat else None) or value.get("max_tokens")
    if asked != 1 or value.get("n", 1) != 1:
        raise Refusal(
            400,
            f"max_tokens={asked}, n={value.get('n', 1)}: this worker prefills in the bubbles of a training job and "
            'does not decode; set max_tokens=1, or kv_transfer_params={"do_remote_decode": true} and decode on '
            "another instance, or start it with inference.prefill.allow_decode=true",
        )


def decodes_elsewhere(value: Mapping[str, Any]) -> bool:
    """True if another instance fetches the prompt's KV cache."""
    transfer = value.get("kv_transfer_params")
    return isinstance(transfer, dict) and bool(transfer.get("do_remote_decode"))


def check_inner_fields(value: Mapping[str, Any]) -> None:
    """Refuse a request that would make vLLM's engine exit.

    Raises:
        Refusal: transfer parameters are where they can only be text.
    """
    inner = value.get("vllm_xargs")
    if isinstance(inner, dict) and (wrong := _INNER_FIELDS & inner.keys()):
        raise Refusal(
            400,
            f"vllm_xargs: {', '.join(sorted(wrong))} is not valid there; give it as a field of the body",
            field="vllm_xargs",
        )


def as_prefill(value: dict[str, Any]) -> dict[str, Any]:
    """Return the request to compute. With `do_remote_decode` it is only the prompt, as one sequence and one token.

    Each further sequence would keep a KV cache that no instance fetches until its lease ends.

    Raises:
        Refusal: the response could not describe the computed KV cache, or the request would make vLLM's engine exit or
            compute outside of bubbles.
    """
    check_inner_fields(value)
    if _has_media(value.get("messages")):
        raise Refusal(
            400,
            "messages: images and the like are encoded outside of a training job's bubbles; send text, or ask a server "
            "that decodes",
            field="messages",
        )
    if not decodes_elsewhere(value):
        return value
    if (count := num_prompts(value)) > 1:
        raise Refusal(
            400,
            f"{count} prompts with kv_transfer_params.do_remote_decode: the response describes the cache of one, and "
            "the others would be decoded from it; send one request for each prompt",
        )
    if value.get("stream"):
        raise Refusal(400, "stream=true: a stream has no kv_transfer_params to decode by; set stream=false")
    given = {name: value[name] for name in _OF_DECODING if value.get(name) is not None}
    for name, number in given.items():
        if not _is_int(number):  # vLLM would take 100.0 and "100" for 100
            raise Refusal(400, f"{name}={number!r:.40}: not an integer; give one")
    bounded = {"max_tokens": 1} | {name: min(number, 1) for name, number in given.items()}
    return {name: field for name, field in value.items() if name != "use_beam_search"} | bounded


def prompt_part(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request that computes the prompt of ``value``, whose KV cache a decode server then fetches.

    It computes one sequence and one token, which is discarded.

    Returns:
        None if the decode server has to compute the prompt, because one prompt's cache is not enough, or has to refuse
        the request.
    """
    numbers = {name: value[name] for name in _OF_DECODING if value.get(name) is not None}
    if (
        num_prompts(value) != 1
        or not all(_is_int(number) and number >= (name != "min_tokens") for name, number in numbers.items())
        or any(numbers.get(name, 1) > 1 for name in ("n", "best_of"))
        or any(value.get(name) for name in ("prompt_embeds", "use_beam_search"))
        or value.get("prompt_logprobs") is not None
        or (value.get("echo") and value.get("logprobs") is not None)
        or _has_media(value.get("messages"))
    ):
        return None
    kept = {name: field for name, field in value.items() if name not in _OF_ANSWERS}
    return kept | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def rendered_part(part: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """Return a completion that computes the prompt of ``part``, a result of `prompt_part`, from its tokens."""
    kept = ("model", "max_tokens", "kv_transfer_params", "cache_salt", "priority")
    return {name: part[name] for name in kept if name in part} | {"prompt": list(tokens)}


def _has_media(messages: object) -> bool:
    """True if a message has an image or the like, whose encoder would compute outside of bubbles."""
    parts = [
        part
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return any(isinstance(part, dict) and _is_media(part) for part in parts)


def _is_media(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind is None or "uuid" in part:  # vLLM goes by the fields
        return any(name.startswith(("image", "audio", "video", "input_")) for name in part)
    return kind not in ("text", "input_text", "output_text", "refusal", "thinking")


def depends_on_server(value: Mapping[str, Any]) -> bool:
    """True if a worker might make other tokens of the prompt than the decode server, or a grammar outside of bubbles.

    A negative `truncate_prompt_tokens` leaves what the server's own model length allows. Some chat templates print
    `response_format`, and a required tool is enforced by a grammar of its parameters (vLLM 0.32.0).
    """
    most, answer_format = value.get("truncate_prompt_tokens"), value.get("response_format")
    is_text = answer_format is None or (isinstance(answer_format, dict) and answer_format.get("type") == "text")
    return (
        not (most is None or (_is_int(most) and most >= 0))
        or ("messages" in value and not is_text)
        or value.get("tool_choice") not in (None, "none", "auto")
    )


def num_prompts(value: Mapping[str, Any]) -> int:
    """Return the number of prompts in the body of any of vLLM's generating routes."""
    prompts, conversations = value.get("prompt"), value.get("messages")
    if isinstance(prompts, list) and all(map(_is_int, prompts)):
        prompts = "tokens"
    if isinstance(conversations, list) and not any(isinstance(one, list) for one in conversations):
        conversations = "messages"
    return sum(
        len(given) if isinstance(given, list) else given is not None
        for given in (prompts, conversations, value.get("prompt_embeds"))
    )


class Completion:
    """Detects, from the parts of a response of status 200, whether the response completes its request.

    When vLLM shuts down, it ends all requests with status 200, either with a special finish reason or with a stream
    without any. Quotes inside generated text are escaped, so the text cannot match.
    """

    def __init__(self) -> None:
        self._ended = False

    def is_aborted(self, part: bytes) -> bool:
        """Process the next part. Return True if the response ends with it, and the request was not completed."""
        self._ended = self._ended or _ENDED.search(part) is not None
        return _ABORTED.search(part) is not None or (not self._ended and b"data: [DONE]" in part)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
