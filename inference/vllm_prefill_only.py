"""ASGI middleware for the worker's API server: it prefills only, and says so before anything is queued.

`--middleware weft.inference.vllm_prefill_only.PrefillOnly`
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weft.inference.requests import Refusal, check_prefill_only, parse

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATING = ("/v1/completions", "/v1/chat/completions")
MOST_BYTES = 8 * 2**20
"""Largest request body."""
MOST_DEPTH = 64
"""Deepest nesting of a body."""


def judge(body: bytes) -> None:
    """Refuse a request that this worker could not serve whole.

    Raises:
        Refusal: with what to do.
    """
    check_prefill_only(parse(body, max_depth=MOST_DEPTH))


class PrefillOnly:
    """Reads the body of generating requests, refuses with 4xx or hands it on unchanged."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Judge one request, as ASGI has it."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(receive)
            judge(body)
        except Refusal as refusal:
            await _answer(send, refusal)
            return
        handed_on = False

        async def again() -> Message:
            nonlocal handed_on
            if handed_on:
                return await receive()
            handed_on = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(400, "the connection was closed before the body had come")
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise Refusal(413, f"the body is larger than {MOST_BYTES} bytes")
        if not message.get("more_body"):
            return bytes(body)


async def _answer(send: Send, refusal: Refusal) -> None:
    body = json.dumps(refusal.answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
