"""HTTPS of the controller: connections that count from their first byte on, before their handshakes."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol, SSLProtocolState
from typing import Any

from weft.conf.schema import ControllerConfig


def tls_context(settings: ControllerConfig) -> ssl.SSLContext | None:
    """Return the context with the controller's certificate, or None if it serves HTTP.

    Raises:
        OSError, ValueError: certificate or key cannot be loaded.
    """
    if not settings.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None, password=lambda: b"")
    return context


class Tls(SSLProtocol):
    """TLS of a connection whose protocol is notified before the handshake, and can limit it.

    asyncio's own notifies it afterwards, waits 60 s, and allocates 256 KiB for each connection. `SSLProtocol` is
    private to asyncio: this holds for Python 3.11 to 3.13.
    """

    max_size = 16_384

    def __init__(self, protocol: asyncio.Protocol, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        waiter: Any = None
        super().__init__(loop, protocol, context, waiter, server_side=True, call_connection_made=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        super().connection_made(transport)
        self._app_protocol.connection_made(self._app_transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Notify the protocol, even if the handshake has not ended."""
        self._set_state(SSLProtocolState.UNWRAPPED)  # type: ignore[attr-defined]
        super().connection_lost(exc)
