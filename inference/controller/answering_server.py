"""A server that answers whole requests, and its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from weft.conf.schema import ControllerConfig
from weft.inference.controller.begin import EVENT, EVENT_END
from weft.inference.controller.server_connections import Lost, ServerResponse, Servers
from weft.inference.requests import Completion, Refusal, models_of

RETRY_S = 5
"""Retry-After while the decode server restarts, or has a full queue."""
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "date"}
"""Headers of the decode server's response that this server sends itself."""
STREAM_ERROR = "weft.stream_error"
"""Name in a request's scope of the HTTP status with which its stream has broken off, or 0."""


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
                return Stream(self, response, begun, kept)
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


def _gone() -> Refusal:
    return Refusal(
        503,
        "the decode server ends, starts or does not answer; send the request again, with stream=true if its answer may "
        "take longer than inference.controller.answer_timeout_s",
        retry_after_s=RETRY_S,
    )


class Breakable(StreamingResponse):
    """A stream of events. If it breaks off, its last event is an error.

    Attributes:
        error: HTTP status of that error, which the request's scope then has as `STREAM_ERROR`, or 0.
    """

    error = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and close the connection to the server, however that ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            scope[STREAM_ERROR] = self.error
            self.close()

    def close(self) -> None:
        """Close the connection to the server, so that it ends the request."""


class Stream(Breakable):
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
        """Close the connection to the decode server."""
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


def last_event(error: Mapping[str, Any]) -> bytes:
    """Return the end of a stream that breaks off."""
    return EVENT + json.dumps(error).encode() + EVENT_END + EVENT + b"[DONE]" + EVENT_END
