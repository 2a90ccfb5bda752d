"""The connections to servers."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import aiohttp

KEPT_S = 4.0
"""Seconds that a connection is kept between requests. vLLM closes one after 5 s, and loses a request that it begins."""


class Lost(Exception):
    """A server does not answer, or breaks off."""


class Unreachable(Lost):
    """A server takes no connection, and so has received nothing."""


class ServerResponse:
    """A server's response.

    Attributes:
        status: its status code.
        headers: with names in lower case.
        content: empty until it has been read.
    """

    def __init__(self, status: int, headers: Mapping[str, str], content: bytes = b"") -> None:
        self.status, self.headers, self.content = status, headers, content

    @property
    def is_success(self) -> bool:
        """True if the status is one of success."""
        return 200 <= self.status < 300

    @property
    def is_client_error(self) -> bool:
        """True if the server says that the request is wrong."""
        return 400 <= self.status < 500

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the content as it arrives. Raises Lost."""
        yield self.content

    async def read(self) -> Self:
        """Read the content, and close. Raises Lost."""
        try:
            self.content = b"".join([part async for part in self.parts()])
        finally:
            self.close()
        return self

    def close(self) -> None:
        """Close the connection, unless the content has been read to its end."""


class Servers:
    """Sends requests to servers."""

    def __init__(self, *, headers: Mapping[str, str] | None = None, keeps: bool = False) -> None:
        """Create the sender without a connection.

        Args:
            headers: sent with each request.
            keeps: True if connections are kept between requests.
        """
        self._headers, self._keeps = headers, keeps

    async def __aenter__(self) -> Self:
        # Servers on other hosts may have certificates of this host's store, or of SSL_CERT_FILE.
        kept: dict[str, Any] = {"keepalive_timeout": KEPT_S} if self._keeps else {"force_close": True}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context(), **kept),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Content-Type",),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def open(
        self,
        method: str,
        url: str,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        connect_s: float | None = None,
        total_s: float | None = None,
    ) -> ServerResponse:
        """Send a request, and return the response, whose content has not been read. Raises Lost."""
        with _lost():
            response = await self._session.request(
                method,
                url,
                data=content or None,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total_s, connect_s),
            )
        return _Arriving(response)

    async def ask(
        self, method: str, url: str, content: bytes = b"", headers: Mapping[str, str] | None = None, **limits_s: float
    ) -> ServerResponse:
        """Send a request as `open` does, and return the response, whose content has been read. Raises Lost."""
        return await (await self.open(method, url, content, headers, **limits_s)).read()


class _Arriving(ServerResponse):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        headers: dict[str, str] = {}
        for name, value in response.raw_headers:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        super().__init__(response.status, headers)
        self._response = response

    async def parts(self) -> AsyncIterator[bytes]:
        with _lost():
            async for part in self._response.content.iter_any():
                yield part

    def close(self) -> None:
        self._response.close()


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise Unreachable(str(error)) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Lost(str(error)) from error
