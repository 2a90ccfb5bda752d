"""ASGI middleware at the door of a worker's API: what is not on its list is not there.

`--middleware weft.inference.worker.vllm_door.PrefillOnly`, or `.Door` for workers that also decode. vLLM's
server answers some sixty paths, of which a dozen generate and others change the engine; its own key
check guards those below four prefixes. Here a list says what is served, the key is asked for
everything but `/health`, and a prompt is judged before anything is queued.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from weft.inference.requests import Refusal, check_prefill_only, parse
from weft.inference.worker.status import problem_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HEALTH = ("GET", "/health")
GENERATING = (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"))
LISTED = (HEALTH, ("GET", "/v1/models"), ("GET", "/metrics"), *GENERATING)
KEY_VARIABLE = "VLLM_API_KEY"
STATUS_VARIABLE = "WEFT_WORKER_STATUS"
"""Environment variable with the file of the engine's `WorkerStatus`."""
MOST_BYTES = 8 * 2**20
"""Largest request body."""
MOST_DEPTH = 64
"""Deepest nesting of a body."""
RECEIVE_S = 60.0
"""Longest time that a body may take to come."""


class Door:
    """Lets through what is listed, for those who have the key; the rest is answered here."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        """In front of ``app``; key and status file come by the environment."""
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "").encode()
        status = os.environ.get(STATUS_VARIABLE, "")
        self._status = Path(status) if status else None

    def judge(self, body: bytes) -> None:
        """Refuse a prompt that this worker cannot serve.

        Raises:
            Refusal: with what to do.
        """
        parse(body, max_depth=MOST_DEPTH)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Judge one request, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        asked = scope["method"], scope["path"]
        try:
            self._admit(scope, asked)
            if asked in GENERATING:
                async with asyncio.timeout(RECEIVE_S):
                    body = await _read(receive)
                self.judge(body)
                receive = _again(body, receive)
        except TimeoutError:
            await _answer(send, Refusal(408, f"the request took longer than {RECEIVE_S:g} s to come"))
            return
        except Refusal as refusal:
            await _answer(send, refusal)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Message, asked: tuple[str, str]) -> None:
        if asked not in LISTED:
            listed = ", ".join(f"{method} {path}" for method, path in LISTED)
            raise Refusal(404, f"{asked[0]} {asked[1]}: not served by a prefill worker; it answers {listed}")
        if asked == HEALTH:
            if self._status is not None and (problem := problem_of(self._status, time.monotonic_ns())):
                raise Refusal(503, problem)
        elif self._key and not self._has_key(scope):
            raise Refusal(401, "no API key, or a wrong one; send it as `Authorization: Bearer KEY`")

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)


class PrefillOnly(Door):
    """Also refuses prompts that would have to be decoded here."""

    def judge(self, body: bytes) -> None:
        """As `Door.judge`."""
        check_prefill_only(parse(body, max_depth=MOST_DEPTH))


def _again(body: bytes, receive: Receive) -> Receive:
    """What hands on a body that was read, and then what comes after it."""
    handed_on = False

    async def again() -> Message:
        nonlocal handed_on
        if handed_on:
            return await receive()
        handed_on = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


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
    if refusal.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
