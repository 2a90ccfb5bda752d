"""ASGI middleware that requires a key, and restricts a worker's API to an allow-list of routes.

Set by `--middleware` to `PrefillOnlyMiddleware`, to `ApiMiddleware` for workers that also decode, or to `KeyMiddleware`
for the decode server. vLLM's server has some sixty routes, of which a dozen generate and others change the engine; its
own key check covers four prefixes only. This middleware requires the key for everything but `/health`. On workers it
serves allowed routes only, and validates prompts before they are queued.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from weft.inference.requests import Completion, Refusal, as_prefill, check_prefill_only, parse
from weft.inference.worker import vllm_scores
from weft.inference.worker.bubble_report import ROUTE as REPORT
from weft.inference.worker.bubble_report import BubbleReport
from weft.inference.worker.engine_echo import EngineEcho
from weft.inference.worker.proofs import HEADER, SCHEME, answer_proof, nonce_of
from weft.inference.worker.score_arrays import ROUTE as SCORES
from weft.inference.worker.settings import SETTINGS_VARIABLE
from weft.inference.worker.status import is_leaving, problem_of
from weft.inference.worker.vllm_weights import FOLDER_VARIABLE, ROUTE, Weights

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
Answer = tuple[Mapping[str, Any] | bytes, Headers]
"""A body, and further headers."""

HEALTH = ("GET", "/health")
GENERATING = (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"))
SCORING, REPORTING = ("POST", SCORES), ("GET", REPORT)
ALLOWED = (HEALTH, ("GET", "/v1/models"), ("GET", "/metrics"), SCORING, REPORTING, *GENERATING)
REPLACING = (("GET", ROUTE), ("POST", ROUTE))
"""Routes of workers whose weights can be replaced."""
KEY_VARIABLE = "VLLM_API_KEY"
STATUS_VARIABLE = "WEFT_WORKER_STATUS"
"""Environment variable with the path of the engine's `WorkerStatus`."""
NONCE = "weft.nonce"
"""Key of a request's scope with the nonce of its proof."""
MOST_BYTES = 8 * 2**20
"""Maximum size of a request body."""
MOST_DEPTH = 64
"""Maximum nesting of a body."""
RECEIVE_S = 60.0
"""Time limit for receiving a body."""
ENDED_S = 2.0
"""Time limit for answers once vLLM's engine has ended."""


class KeyMiddleware:
    """Forwards requests that have the key, and answers all others itself."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        """Wrap ``app``. The key is read from the environment."""
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "").encode()
        self._echo = EngineEcho()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request (the ASGI interface)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        response = _Response(send)
        handling = asyncio.create_task(self._handle(scope, receive, response))
        try:
            if await _is_handled(handling, scope["app"].state.server):
                return handling.result()
        finally:
            handling.cancel()
        await asyncio.wait([handling], timeout=ENDED_S)
        await response.shut_down()

    async def _handle(self, scope: Message, receive: Receive, send: _Response) -> None:
        try:
            self._authorize(scope, (scope["method"], scope["path"]))
            if (own := await self._answer(scope, receive)) is not None:
                await _send(send, 200, *own)
                return
            app_receive, app_send = await self._exchange(scope, receive, send)
        except Refusal as refusal:
            await _refuse(send, refusal)
            return
        await self._app(scope, app_receive, app_send)

    def _authorize(self, scope: Message, asked: tuple[str, str]) -> None:
        if asked == HEALTH and (problem := self._problem(scope)):
            raise Refusal(503, problem)
        if asked != HEALTH and self._key and not self._has_key(scope):
            raise Refusal(401, "missing or invalid API key; send it as `Authorization: Bearer KEY`")

    def _problem(self, scope: Message) -> str:
        """Return why the engine makes no progress, or empty if it does."""
        return self._echo.problem(scope["app"].state.engine_client.is_paused)

    async def _answer(self, scope: Message, receive: Receive) -> Answer | None:
        """Return the answer to a request that is not forwarded, or None."""
        return None

    async def _exchange(self, scope: Message, receive: Receive, send: _Response) -> tuple[Receive, Send]:
        return receive, send

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if self._key and scheme.lower() == SCHEME and (nonce := nonce_of(self._key, key)) is not None:
            scope[NONCE] = nonce
            return True
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)


class ApiMiddleware(KeyMiddleware):
    """Forwards authorized requests to allowed routes only."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        """Wrap ``app``. The key and the status file are read from the environment."""
        super().__init__(app)
        status = os.environ.get(STATUS_VARIABLE, "")
        self._status = Path(status) if status else None
        settings = os.environ.get(SETTINGS_VARIABLE, "")
        self._report = BubbleReport(settings) if settings else None
        weights = os.environ.get(FOLDER_VARIABLE, "")
        self._weights = Weights(weights) if weights else None

    def validate(self, body: bytes) -> bytes:
        """Return the body to forward. See `as_prefill`.

        Raises:
            Refusal: this worker cannot serve the prompt. The message has a remedy.
        """
        value = parse(body, max_depth=MOST_DEPTH)
        self.check(value)
        prefill = as_prefill(value)
        return body if prefill == value else json.dumps(prefill).encode()

    def check(self, value: Mapping[str, Any]) -> None:
        """Check a request further. Subclasses override this.

        Raises:
            Refusal: the request is not served. The message has a remedy.
        """

    def _authorize(self, scope: Message, asked: tuple[str, str]) -> None:
        if asked not in ALLOWED and not (self._weights and asked in REPLACING):
            allowed = ", ".join(f"{method} {path}" for method, path in ALLOWED)
            raise Refusal(404, f"{asked[0]} {asked[1]}: not served by a prefill worker; available: {allowed}")
        super()._authorize(scope, asked)

    def _problem(self, scope: Message) -> str:
        return problem_of(self._status, time.monotonic_ns()) if self._status is not None else ""

    async def _answer(self, scope: Message, receive: Receive) -> Answer | None:
        asked = scope["method"], scope["path"]
        if asked in (SCORING, REPORTING) and NONCE not in scope:
            raise Refusal(401, f"{asked[1]}: the answer needs a nonce; send `Authorization: Weft NONCE:PROOF`")
        if asked == SCORING:
            return await self._score(scope, receive)
        if asked == REPORTING and self._report is not None:
            report = await asyncio.to_thread(self._report.answer, scope["query_string"])
            return report, self._proved(scope, b"", report)
        if self._weights is None or asked not in REPLACING:
            return None
        if asked[0] == "POST":
            value = parse(await _read_in_time(receive), max_depth=MOST_DEPTH)
            await self._weights.load(scope["app"].state.engine_client, value.get("name"))
        return {"name": self._weights.name}, ()

    async def _score(self, scope: Message, receive: Receive) -> Answer:
        body = await _read_in_time(receive)
        scores = await vllm_scores.score(scope["app"].state, parse(body, max_depth=MOST_DEPTH), receive)
        return scores, self._proved(scope, body, scores)

    def _proved(self, scope: Message, request: bytes, answer: bytes) -> Headers:
        """Return the header that proves an answer."""
        return [(HEADER.encode(), answer_proof(self._key, scope[NONCE], request, answer).encode())]

    async def _exchange(self, scope: Message, receive: Receive, send: _Response) -> tuple[Receive, Send]:
        if (scope["method"], scope["path"]) not in GENERATING:
            return receive, send
        body = await _read_in_time(receive)
        return _replay(self.validate(body), receive), _Completed(send, self._status)


class PrefillOnlyMiddleware(ApiMiddleware):
    """Middleware that also refuses requests that need decoding here."""

    def check(self, value: Mapping[str, Any]) -> None:
        """See `check_prefill_only`."""
        check_prefill_only(value)


class _Response:
    """A ``send`` that can end its response with 503."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def __call__(self, message: Message) -> None:
        self._begun = True
        await self._send(message)

    async def shut_down(self) -> None:
        refusal = Refusal(503, "the worker shuts down; send the prompt to another one, or again", retry_after_s=1)
        if not self._begun:
            await _refuse(self._send, refusal)
        else:  # a stream
            event = b"data: " + json.dumps(refusal.answer).encode() + b"\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event})


class _Completed:
    """A ``send`` that answers 503 if vLLM dropped the request because it shuts down.

    vLLM itself would abort the request with status 200, or find its engine gone and answer 500.
    """

    def __init__(self, send: _Response, status: Path | None) -> None:
        self._send, self._status = send, status
        self._start: Message | None = None
        self._completion = Completion()
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if self._ended:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        failed = start is not None and start["status"] >= 500
        left = failed and self._status is not None and is_leaving(self._status)
        if left or self._completion.is_aborted(message.get("body", b"")):
            self._ended = True
            await self._send.shut_down()
            return
        if start is not None:
            await self._send(start)
        await self._send(message)


async def _is_handled(handling: asyncio.Task[None], server: Any) -> bool:
    """Wait until a request is handled. Return False if vLLM's engine ended `ENDED_S` ago, so that it cannot be.

    vLLM ends its engine, sets ``should_exit`` and waits for all responses. Those of requests whose abort was still on
    its way from the engine would never come.
    """
    had_ended = False
    while not handling.done():
        if had_ended and server.should_exit:
            return False
        had_ended = server.should_exit
        await asyncio.wait([handling], timeout=ENDED_S)
    return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that replays a body that was read already."""
    replayed = False

    async def receive_again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _read_in_time(receive: Receive) -> bytes:
    try:
        async with asyncio.timeout(RECEIVE_S):
            return await _read(receive)
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {RECEIVE_S:g} s to arrive") from None


async def _read(receive: Receive) -> bytes:
    body, is_too_large = bytearray(), False
    while True:
        message = await receive()
        if message["type"] != "http.request" and not is_too_large:
            raise Refusal(400, "the connection was closed before the body was complete")
        body += message.get("body", b"")
        if is_too_large := is_too_large or len(body) > MOST_BYTES:
            body.clear()  # and read on, because closing the connection while a client still sends resets it
        if not message.get("more_body"):
            break
    if is_too_large:
        raise Refusal(413, f"the body is larger than {MOST_BYTES} bytes")
    return bytes(body)


async def _refuse(send: Send, refusal: Refusal) -> None:
    headers = [(b"connection", b"close")] if refusal.status in (408, 413) else []
    if refusal.retry_after_s:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    await _send(send, refusal.status, refusal.answer, headers)


async def _send(send: Send, status: int, value: Mapping[str, Any] | bytes, headers: Headers = ()) -> None:
    body, kind = (value, b"octet-stream") if isinstance(value, bytes) else (json.dumps(value).encode(), b"json")
    described = [(b"content-type", b"application/" + kind), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": described})
    await send({"type": "http.response.body", "body": body})
