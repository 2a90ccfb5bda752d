"""Validation of untrusted requests: JSON nesting, and what a prefill worker can serve."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Refusal(Exception):
    """A request that is answered with an HTTP error.

    Attributes:
        status: HTTP status.
        retry_after_s: seconds after which the same request may succeed; 0 if never.
    """

    def __init__(self, status: int, message: str, *, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def answer(self) -> dict[str, Any]:
        """The response body, in OpenAI's error format."""
        kind = "invalid_request_error" if self.status < 500 else "service_unavailable"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.status}}


def parse(body: bytes, *, max_depth: int) -> dict[str, Any]:
    """Parse ``body`` as a JSON object.

    Raises:
        Refusal: invalid, or nested deeper than ``max_depth``.
    """
    if nests_deeper(body, max_depth):
        raise Refusal(400, f"the body is nested deeper than {max_depth} levels")
    try:
        value = json.loads(body)
    except ValueError as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object")
    return value


def nests_deeper(body: bytes, depth: int) -> bool:
    """Whether brackets are nested deeper than ``depth``, without a recursive parser."""
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    return any(level > depth for level in accumulate(1 if bracket in b"[{" else -1 for bracket in brackets))


def check_prefill_only(value: Mapping[str, Any]) -> None:
    """Refuse a request that this worker would have to decode.

    Raises:
        Refusal: with a remedy.
    """
    transfer = value.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("do_remote_decode"):
        return
    asked = value.get("max_completion_tokens") or value.get("max_tokens")
    if asked != 1 or value.get("n", 1) != 1:
        raise Refusal(
            400,
            f"max_tokens={asked}, n={value.get('n', 1)}: this worker prefills in the bubbles of a training job and "
            'does not decode; set max_tokens=1, or kv_transfer_params={"do_remote_decode": true} and decode on '
            "another instance, or start it with inference.prefill.allow_decode=true",
        )
