"""The connections to servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import httpx


class Transport(httpx.AsyncHTTPTransport):
    """Gives each connection back, in whatever moment its request is cancelled.

    httpcore (1.0.9) keeps some forever when a task is cancelled as it begins to send, or closes a response. It expects
    cancellation by a scope of anyio, which spares such moments.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response, whose content has not been read."""
        scope = anyio.CancelScope()
        sending = asyncio.create_task(self._send(request, scope))
        try:
            response = await asyncio.shield(sending)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.shield(_close(sending))
            raise
        assert response is not None and isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Content(response.stream)
        return response

    async def _send(self, request: httpx.Request, scope: anyio.CancelScope) -> httpx.Response | None:
        """Return the response, or None once ``scope`` is cancelled."""
        with scope:
            return await super().handle_async_request(request)
        return None


class _Content(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        await asyncio.shield(self._stream.aclose())


async def _close(sending: asyncio.Task[httpx.Response | None]) -> None:
    with suppress(httpx.TransportError):
        if (response := await sending) is not None:
            await response.aclose()
