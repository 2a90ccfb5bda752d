"""Whole answers: a worker computes the prompt in bubbles, and the decode server streams the answer.

Users never wait for training: a prompt that no worker computes within its deadline is computed by the decode server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from weft.conf.schema import ControllerConfig
from weft.inference.controller.begin import EVENT, EVENT_END, Begin, may_begin
from weft.inference.controller.dispatch import Dispatch, PrefillRequest
from weft.inference.controller.metrics import Metrics
from weft.inference.controller.server_connections import Lost, ServerResponse, Servers
from weft.inference.requests import (
    DRAWN,
    GIVEN,
    Completion,
    Refusal,
    depends_on_server,
    models_of,
    object_of,
    prompt_part,
    rendered_part,
)

RETRY_S = 5
"""Retry-After while the decode server restarts, or has a full queue."""
QUEUE_S = 0.5
"""Interval at which an answer that has begun asks a full decode server again."""
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "date"}
"""Headers of the decode server's response that this server sends itself."""
STREAM_ERROR = "weft.stream_error"
"""Name in a request's scope of the HTTP status with which its stream has broken off, or 0."""
_COMPLETIONS = "/v1/completions"


class AnsweringServer:
    """A server of OpenAI's API that answers whole requests."""

    def __init__(self, url: str, servers: Servers, settings: ControllerConfig, *, key: str = "") -> None:
        """Create the client of a server.

        Args:
            servers: without credentials for other servers.
        """
        self.url, self._servers, self._silence_s = url.rstrip("/"), servers, settings.silence_s
        self._silence_limit_s = settings.answer_timeout_s
        self._connect_s = settings.answer_slack_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._longest: dict[str, int] = {}

    async def refresh(self) -> None:
        """Read the maximum number of tokens with each model, which changes with adapters and restarts."""
        listed = []
        with suppress(Refusal):
            listed = models_of((await self.get("/v1/models")).content)
        most = listed[0].get("max_model_len") if listed else None
        self._longest = {str(one.get("id")): most for one in listed if isinstance(most, int)}

    def longest(self, model: object) -> int:
        """Return the maximum number of tokens of prompt and answer with a model or adapter, or 0 if it is unknown.

        Args:
            model: its name, or None for the first model.
        """
        return max(self._longest.values(), default=0) if model is None else self._longest.get(str(model), 0)

    async def answer(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        added: dict[str, str],
        begun: Callable[[], None],
    ) -> Response:
        """Return the server's response, which is streamed as it is produced.

        Args:
            path: path in OpenAI's API.
            body: forwarded unchanged.
            headers: client headers to forward.
            added: headers to add to the response.
            begun: called when the first part of a successful response arrives.

        Raises:
            Refusal: the server does not answer.
        """
        sent = {**headers, **self._headers, "accept-encoding": "identity"}
        try:
            async with self.unless_lost():
                response = await self._servers.open("POST", f"{self.url}{path}", body, sent, connect_s=self._connect_s)
            kept = {name: text for name, text in response.headers.items() if name not in _OF_CONNECTION} | added
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE:  # its queue is full
                kept.setdefault("retry-after", str(RETRY_S))
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return _Stream(self, response, begun, kept)
            async with self.unless_lost():
                content = (await response.read()).content
        except Lost as error:
            raise _gone() from error
        if response.is_success:
            if Completion().is_aborted(content):
                raise _gone()
            begun()
        return Response(content, status_code=response.status, headers=kept)

    @asynccontextmanager
    async def unless_lost(self) -> AsyncIterator[None]:
        """Wait in the block for the server, unless it is lost.

        Raises:
            Lost: it breaks off, is silent for `silence_s` and then not healthy, or is silent for `answer_timeout_s`.
        """
        try:
            async with asyncio.timeout(self._silence_limit_s) as limit:
                watching = asyncio.create_task(self._watch(limit))
                try:
                    yield
                finally:
                    watching.cancel()
        except TimeoutError as error:
            raise Lost("the server is silent") from error

    async def _watch(self, limit: asyncio.Timeout) -> None:
        """Let ``limit`` expire when the server is lost."""
        try:
            while True:
                await asyncio.sleep(self._silence_s)
                health = await self._get("/health", self._silence_s)
                if health.status >= 500:  # a server without a health check answers 404
                    break
        except Lost:
            pass
        limit.reschedule(0.0)

    async def render(self, path: str, body: bytes, headers: Mapping[str, str]) -> list[int]:
        """Return the tokens of a request's prompt as vLLM renders it. There are none if the server refuses it."""
        url, sent = f"{self.url}{path}/render", {**headers, **self._headers}
        try:
            response = await self._servers.ask("POST", url, body, sent, connect_s=self._connect_s)
            rendered = json.loads(response.content) if response.is_success else None
        except (Lost, ValueError):
            return []
        if isinstance(rendered, list) and len(rendered) == 1:  # of a completion
            (rendered,) = rendered
        tokens = rendered.get("token_ids") if isinstance(rendered, dict) else None
        return tokens if isinstance(tokens, list) else []

    async def get(self, path: str) -> ServerResponse:
        """Return the response to a GET request. Raise Refusal if the server does not answer."""
        try:
            return await self._get(path, self._connect_s)
        except Lost as error:
            raise _gone() from error

    async def _get(self, path: str, total_s: float) -> ServerResponse:
        return await self._servers.ask("GET", f"{self.url}{path}", headers=self._headers, total_s=total_s)


class Answers:
    """Answers requests of `/v1/completions` and `/v1/chat/completions` as the decode server would."""

    def __init__(
        self,
        server: AnsweringServer,
        dispatch: Dispatch,
        metrics: Metrics,
        *,
        near: Sequence[AnsweringServer],
        continues: bool,
        patience_s: float,
    ) -> None:
        """Create the answers of a decode server.

        Args:
            near: the decode server near each worker, which answers the prompts that the worker computes. If it fails,
                ``server`` does.
            continues: True if ``server`` continues a worker's first token (`GivenToken`).
            patience_s: seconds for which an answer that has begun waits while the decode server's queue is full.
        """
        self._server, self._dispatch, self._metrics, self._near = server, dispatch, metrics, near
        self._continues, self._patience_s = continues, patience_s
        self._avoided_until_s: dict[str, float] = {}

    async def refresh(self) -> None:
        """Read what the server's answers may begin with. Call it every second or so."""
        if self._continues:
            await self._server.refresh()

    async def answer(self, request: PrefillRequest, value: Mapping[str, Any]) -> Response:
        """Return the decode server's response, which is streamed as it is produced.

        Args:
            request: the client's request, with 0 tokens if no worker can compute the prompt.
            value: its parsed body.

        Raises:
            Refusal: the decode server does not answer.
        """
        begun_s = time.monotonic()
        may = self._continues and may_begin(value) and self._avoided_until_s.get(self._server.url, 0.0) <= begun_s
        longest = self._server.longest(value.get("model")) if may else 0
        transfer, added, prefilled = await self._prefill(request, value, with_tokens=longest > 0)
        prefiller = "bubble" if transfer else "decode"

        def begun() -> None:
            self._metrics.begun(prefiller, time.monotonic() - begun_s)

        if not transfer:
            return await self._answer_by(self._server, request, added, begun)
        server, drawn = self._near[int(added["X-Weft-Worker"])], transfer.pop(DRAWN, None)
        begin = Begin.of(value, prefilled, drawn, longest) if longest and server is self._server else None
        if begin is not None:
            begun()
            transfer[GIVEN] = begin.token
            return _Begun(begin, lambda: self._continue(_with_transfer(request, value, transfer)), added)
        return await self._answer_by(server, _with_transfer(request, value, transfer), added, begun)

    async def _answer_by(
        self, near: AnsweringServer, request: PrefillRequest, added: dict[str, str], begun: Callable[[], None]
    ) -> Response:
        """Return the response of ``near``, or if it fails of the server of all."""
        path, body, headers = request.path, request.body, request.headers
        if near is not self._server and self._avoided_until_s.get(near.url, 0.0) <= time.monotonic():
            with suppress(Refusal):
                response = await near.answer(path, body, headers, added=added, begun=begun)
                if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                    return response
            self._avoid(near)
        try:
            response = await self._server.answer(path, body, headers, added=added, begun=begun)
        except Refusal:
            self._avoid(self._server)
            raise
        if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            self._avoid(self._server)
        return response

    async def _continue(self, request: PrefillRequest) -> Response:
        """Return the response that continues an answer. While the server's queue is full, ask again."""
        until_s = time.monotonic() + self._patience_s
        while True:
            response = await self._answer_by(self._server, request, {}, lambda: None)
            if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > until_s:
                return response
            await asyncio.sleep(QUEUE_S)

    def _avoid(self, server: AnsweringServer) -> None:
        self._avoided_until_s[server.url] = time.monotonic() + RETRY_S

    async def _prefill(
        self, request: PrefillRequest, value: Mapping[str, Any], *, with_tokens: bool
    ) -> tuple[dict[str, Any] | None, dict[str, str], dict[str, Any]]:
        """Return the parameters by which the decode server fetches the prompt's cache, and headers for the client.

        There are none if the decode server has to compute the prompt. The third value is the worker's response.

        Args:
            with_tokens: the response has the tokens that the client asks for.
        """
        part = prompt_part(value) if request.tokens else None
        if part is None:
            return self._fallback("request")
        if with_tokens and value.get("return_token_ids"):
            part["return_token_ids"] = True
        until_s, rendered = time.monotonic() + request.deadline_s, list[int]()
        path, tokens = request.path, request.tokens
        try:
            async with asyncio.timeout(request.deadline_s):
                if depends_on_server(value):
                    rendered = await self._server.render(path, request.body, request.headers)
                    if not 0 < len(rendered) < self._dispatch.max_tokens:
                        return self._fallback("request")
                    path, part, tokens = _COMPLETIONS, rendered_part(part, rendered), len(rendered)
                left_s = max(0.0, until_s - time.monotonic())
                body = json.dumps(part).encode()
                prefill = replace(request, path=path, body=body, tokens=tokens, deadline_s=left_s)
                response, ticket = await self._dispatch.prefill(prefill)
        except TimeoutError:
            return self._fallback("late")
        except Refusal as refusal:
            return self._fallback("no bubble" if refusal.status == 503 else "worker")
        prefilled = object_of(response.content) if response.is_success else {}
        transfer = prefilled.get("kv_transfer_params")
        if not isinstance(transfer, dict):
            return self._fallback("worker")
        self._metrics.prefilled("bubble", "")
        if rendered:  # the decode server computes these tokens, instead of rendering again
            transfer["prompt_token_ids"] = rendered
        return transfer, {"X-Weft-Worker": str(ticket.worker)}, prefilled

    def _fallback(self, reason: str) -> tuple[None, dict[str, str], dict[str, Any]]:
        self._metrics.prefilled("decode", reason)
        return None, {"X-Weft-Fallback": reason}, {}

    async def models(self) -> ServerResponse:
        """Return the decode server's list of models."""
        return await self._server.get("/v1/models")

    async def is_up(self) -> bool:
        """True if the decode server is healthy."""
        try:
            return (await self._server.get("/health")).is_success
        except Refusal:
            return False


def _gone() -> Refusal:
    return Refusal(
        503,
        "the decode server ends, starts or does not answer; send the request again, with stream=true if its answer may "
        "take longer than inference.controller.answer_timeout_s",
        retry_after_s=RETRY_S,
    )


class _Breakable(StreamingResponse):
    """A stream of events. If it breaks off, its last event is an error.

    Attributes:
        error: HTTP status of that error, which the request's scope then has as `STREAM_ERROR`, or 0.
    """

    error = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            scope[STREAM_ERROR] = self.error
            self.close()

    def close(self) -> None:
        """Close the connection to the server, so that it ends the request."""


class _Stream(_Breakable):
    """A stream of the decode server.

    Args:
        first: called at the first event.
    """

    def __init__(
        self, server: AnsweringServer, response: ServerResponse, first: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        self._response = response
        self.events = self._events(server, first)
        super().__init__(self.events, status_code=response.status, headers=headers)

    def close(self) -> None:
        self._response.close()

    async def _events(self, server: AnsweringServer, first: Callable[[], None]) -> AsyncIterator[bytes]:
        """Yield events as they arrive."""
        completion, rest, is_first, parts = Completion(), b"", True, self._response.parts()
        try:
            while True:
                async with server.unless_lost():
                    part = await anext(parts, b"")
                if not part:
                    if rest:
                        yield rest
                    return
                events, end, rest = (rest + part).rpartition(EVENT_END)
                if not end:
                    continue
                if completion.is_aborted(events):
                    break
                if is_first:
                    first()
                is_first = False
                yield events + end
        except Lost:
            pass
        self.error = _gone().status
        yield last_event(_gone().answer)


class _Begun(_Breakable):
    """An answer that begins with a worker's token. ``rest`` then returns the decode server's response."""

    def __init__(self, begin: Begin, rest: Callable[[], Awaitable[Response]], headers: Mapping[str, str]) -> None:
        super().__init__(self._events(begin, rest), media_type="text/event-stream", headers=headers)
        self._rest: Response | None = None

    def close(self) -> None:
        if isinstance(self._rest, _Stream):
            self._rest.close()

    async def _events(self, begin: Begin, rest: Callable[[], Awaitable[Response]]) -> AsyncIterator[bytes]:
        yield begin.events
        try:
            self._rest = await rest()
            if isinstance(self._rest, _Stream):
                async for events in begin.rest(self._rest.events):
                    yield events
                self.error = self._rest.error
                return
            self.error = self._rest.status_code
            if not (error := object_of(bytes(self._rest.body))):
                raise Refusal(502, f"the decode server answered with status {self._rest.status_code}, see its log")
        except Refusal as refusal:
            self.error, error = refusal.status, refusal.answer
        yield last_event(error)


def last_event(error: Mapping[str, Any]) -> bytes:
    """Return the end of a stream that breaks off."""
    return EVENT + json.dumps(error).encode() + EVENT_END + EVENT + b"[DONE]" + EVENT_END


def _with_transfer(request: PrefillRequest, value: Mapping[str, Any], transfer: Mapping[str, Any]) -> PrefillRequest:
    return replace(request, body=json.dumps({**value, "kv_transfer_params": transfer}).encode())
