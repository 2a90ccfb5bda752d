"""Whole answers: a worker computes the prompt in bubbles, and the decode server streams the answer.

Users never wait for training: a prompt that no worker computes within its deadline is computed by the decode server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from weft.inference.controller.answering_server import RETRY_S, AnsweringServer, Breakable, Stream, last_event
from weft.inference.controller.begin import Begin, may_begin
from weft.inference.controller.dispatch import Dispatch, PrefillRequest
from weft.inference.controller.metrics import Metrics
from weft.inference.controller.server_connections import ServerResponse
from weft.inference.requests import (
    DRAWN,
    GIVEN,
    Refusal,
    depends_on_server,
    object_of,
    prompt_part,
    rendered_part,
)

QUEUE_S = 0.5
"""Interval at which an answer that has begun asks a full decode server again."""
_COMPLETIONS = "/v1/completions"


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


class _Begun(Breakable):
    """An answer that begins with a worker's token. ``rest`` then returns the decode server's response."""

    def __init__(self, begin: Begin, rest: Callable[[], Awaitable[Response]], headers: Mapping[str, str]) -> None:
        super().__init__(self._events(begin, rest), media_type="text/event-stream", headers=headers)
        self._rest: Response | None = None

    def close(self) -> None:
        if isinstance(self._rest, Stream):
            self._rest.close()

    async def _events(self, begin: Begin, rest: Callable[[], Awaitable[Response]]) -> AsyncIterator[bytes]:
        yield begin.events
        try:
            self._rest = await rest()
            if isinstance(self._rest, Stream):
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


def _with_transfer(request: PrefillRequest, value: Mapping[str, Any], transfer: Mapping[str, Any]) -> PrefillRequest:
    return replace(request, body=json.dumps({**value, "kv_transfer_params": transfer}).encode())
