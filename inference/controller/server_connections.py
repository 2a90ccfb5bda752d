"""The connections to servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import httpx


class Transport(httpx.AsyncBaseTransport):
    """Sends requests, and gives each connection back, in whatever moment its request is cancelled.

    httpcore (1.0.9) keeps some forever when a task is cancelled as it begins to send, or closes a response. It expects
    cancellation by a scope of anyio, which spares such moments.
    """

    def __init__(self, verify: ssl.SSLContext, *, kept: int = 0) -> None:
        """Create the transport without a connection.

        Args:
            kept: about how many connections are kept between requests; further requests have a new one each. httpcore
                (1.0.9) compares every two idle ones at each request: 512 keep it busy for a minute.
        """
        # Only a server closes a connection that is idle: with a limit of its own, httpx (0.28) may close it under a
        # request that was just given it.
        keeping = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        closing = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._keeping, self._closing = (
            httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False) for limits in (keeping, closing)
        )
        self._free = kept

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response, whose content has not been read."""
        is_kept, scope = self._free > 0, anyio.CancelScope()
        self._free -= is_kept
        sending = asyncio.create_task(self._send(self._keeping if is_kept else self._closing, request, scope))
        try:
            response = await asyncio.shield(sending)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.shield(_close(sending))
            raise
        finally:
            self._free += is_kept
        assert response is not None and isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Content(response.stream)
        return response

    async def _send(
        self, transport: httpx.AsyncHTTPTransport, request: httpx.Request, scope: anyio.CancelScope
    ) -> httpx.Response | None:
        """Return the response, or None once ``scope`` is cancelled."""
        with scope:
            return await transport.handle_async_request(request)
        return None

    async def aclose(self) -> None:
        """Close all connections."""
        await self._keeping.aclose()
        await self._closing.aclose()


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
