"""Whole answers: a worker computes the prompt in bubbles, and the decode server streams the answer.

Users never wait for training: a prompt that no worker computes within its deadline is computed by the decode server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
from fastapi import Response
from fastapi.responses import StreamingResponse

from weft.inference.controller.dispatch import Dispatch, PrefillRequest
from weft.inference.controller.metrics import Metrics
from weft.inference.requests import Completion, Refusal, prompt_part

RETRY_S = 5
"""Retry-After while the decode server restarts."""
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "date"}
"""Headers of the decode server's response that this server sends itself."""
_EVENT_END = b"\n\n"


class Answers:
    """Answers requests of `/v1/completions` and `/v1/chat/completions` as the decode server would."""

    def __init__(
        self, url: str, dispatch: Dispatch, metrics: Metrics, client: httpx.AsyncClient, *, connect_s: float
    ) -> None:
        """Create the service in front of the decode server at ``url``.

        Args:
            connect_s: longest time in which it has to accept a connection.
        """
        self.url, self._dispatch, self._metrics, self._client = url, dispatch, metrics, client
        self._timeout = httpx.Timeout(None, connect=connect_s)

    async def answer(
        self,
        path: str,
        body: bytes,
        value: Mapping[str, Any],
        headers: Mapping[bytes, bytes],
        *,
        tokens: int,
        deadline_s: float,
    ) -> Response:
        """Return the decode server's response, which is streamed as it is produced.

        Args:
            path: path in OpenAI's API.
            body: the client's body.
            value: the parsed body.
            headers: client headers to forward.
            tokens: number of prompt tokens, or 0 if no worker can compute the prompt.
            deadline_s: seconds in which a worker has to compute the prompt.

        Raises:
            Refusal: the decode server does not answer.
        """
        begun_s = time.monotonic()
        transfer, added = await self._prefill(path, value, headers, tokens=tokens, deadline_s=deadline_s)
        prefilled = "bubble" if transfer else "decode"
        if transfer:
            body = json.dumps({**value, "kv_transfer_params": transfer}).encode()
        request = self._client.build_request(
            "POST",
            f"{self.url}{path}",
            content=body,
            headers={**headers, b"accept-encoding": b"identity"},
            timeout=self._timeout,
        )
        try:
            response = await self._client.send(request, stream=True)
            kept = {name: text for name, text in response.headers.items() if name not in _OF_CONNECTION} | added
            if response.headers.get("content-type", "").startswith("text/event-stream"):

                def first() -> None:
                    self._metrics.begun(prefilled, time.monotonic() - begun_s)

                return _Stream(response, first, kept)
            content = await response.aread()
            await response.aclose()
        except httpx.TransportError as error:
            raise _gone() from error
        if response.is_success:
            if Completion().is_aborted(content):
                raise _gone()
            self._metrics.begun(prefilled, time.monotonic() - begun_s)
        return Response(content, status_code=response.status_code, headers=kept)

    async def _prefill(
        self, path: str, value: Mapping[str, Any], headers: Mapping[bytes, bytes], *, tokens: int, deadline_s: float
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Return the parameters by which the decode server fetches the prompt's cache, and headers for the client.

        There are none if the decode server has to compute the prompt.
        """
        part = prompt_part(value) if tokens else None
        if part is None:
            return None, self._fallback("request")
        request = PrefillRequest(
            path=path, body=json.dumps(part).encode(), headers=headers, tokens=tokens, deadline_s=deadline_s
        )
        try:
            async with asyncio.timeout(deadline_s):
                response, ticket = await self._dispatch.prefill(request)
        except TimeoutError:
            return None, self._fallback("late")
        except Refusal as refusal:
            return None, self._fallback("no bubble" if refusal.status == 503 else "worker")
        transfer = response.json().get("kv_transfer_params") if response.is_success else None
        if not isinstance(transfer, dict):
            return None, self._fallback("worker")
        self._metrics.prefilled("bubble", "")
        return transfer, {"X-Weft-Worker": str(ticket.worker)}

    def _fallback(self, reason: str) -> dict[str, str]:
        self._metrics.prefilled("decode", reason)
        return {"X-Weft-Fallback": reason}

    async def models(self) -> Response:
        """Return the decode server's list of models."""
        try:
            response = await self._client.get(f"{self.url}/v1/models", timeout=self._timeout.connect)
        except httpx.TransportError as error:
            raise _gone() from error
        return Response(response.content, status_code=response.status_code, media_type="application/json")

    async def is_up(self) -> bool:
        """True if the decode server is healthy."""
        try:
            return (await self._client.get(f"{self.url}/health", timeout=self._timeout.connect)).is_success
        except httpx.TransportError:
            return False


def _gone() -> Refusal:
    return Refusal(
        503, "the decode server ends, starts or does not answer; send the request again", retry_after_s=RETRY_S
    )


class _Stream(StreamingResponse):
    """A stream of the decode server, whose connection is closed with the client's, so that the server ends the request.

    Args:
        first: called at the first event.
    """

    def __init__(self, response: httpx.Response, first: Callable[[], None], headers: Mapping[str, str]) -> None:
        super().__init__(_events(response, first), status_code=response.status_code, headers=headers)
        self._response = response

    async def __call__(self, *asgi: Any) -> None:
        try:
            await super().__call__(*asgi)
        finally:
            await self._response.aclose()


async def _events(response: httpx.Response, first: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield a stream's events as they arrive. If the stream breaks off, the last event is an error."""
    completion, rest, is_first = Completion(), b"", True
    try:
        async for part in response.aiter_bytes():
            events, end, rest = (rest + part).rpartition(_EVENT_END)
            if not end:
                continue
            if completion.is_aborted(events):
                break
            if is_first:
                first()
            is_first = False
            yield events + end
        else:
            if rest:
                yield rest
            return
    except httpx.TransportError:
        pass
    yield b"data: " + json.dumps(_gone().answer).encode() + b"\n\ndata: [DONE]\n\n"
