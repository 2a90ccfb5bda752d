"""An agent's end of the control wire, which reconnects after every lost connection."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weft.comm.authenticated_socket import HANDSHAKE_TIMEOUT_S, Address, authenticated_socket
from weft.comm.host_port import Service
from weft.engine.supervision.control.frames import MOST_BYTES, pack
from weft.engine.supervision.control.link import Link
from weft.engine.supervision.control.session import Session, checked_greeting

_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 2.0

log = logging.getLogger(__name__)


class ControlClient:
    """Exchanges messages with the driver. All calls are on one asyncio loop.

    Messages sent without a connection are queued for the next one. A message arrives once and in
    order as long as both processes live. A restarted driver receives what the previous one had not
    acknowledged.
    """

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        on_message: Callable[[dict[str, Any]], None],
        on_connected: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Create a client that begins to connect with `start`.

        Args:
            name: identifies this process to the driver; a new connection of the same name replaces the old one.
            on_connected: called at every authenticated connection with a driver.

        Raises:
            ValueError: the address is a TCP address, and ``WEFT_KEY`` is not set.
        """
        self._driver = authenticated_socket(address, Service.CONTROL, listens=False)
        self._on_message, self._on_connected, self._on_lost = on_message, on_connected, on_lost
        self._most_bytes = most_bytes
        self._session = Session(name=name, most_bytes=most_bytes)
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect."""
        self._running = asyncio.create_task(self._run())

    @property
    def connected(self) -> bool:
        """True if there is an authenticated connection now."""
        return self._session.link is not None

    def send(self, message: dict[str, Any], *, latest_of: str = "") -> None:
        """Send ``message`` now or, without a connection, when there is one.

        Args:
            latest_of: only the last of queued messages with the same ``latest_of`` has to arrive.

        Raises:
            ValueError: the message is too large.
        """
        self._session.send(message, latest_of)

    async def close(self) -> None:
        """Send queued messages, and close the connection."""
        if self._running is not None:
            link = self._session.link
            if link is not None:
                link.finish()
                with suppress(TimeoutError):
                    await asyncio.wait_for(link.ended.wait(), HANDSHAKE_TIMEOUT_S)
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    async def _run(self) -> None:
        retry_s, said = _LEAST_RETRY_S, ""
        while True:
            link = Link(
                on_frame=self._take, on_tick=self._session.give_sign, on_end=self._end, most_bytes=self._most_bytes
            )
            try:
                await self._greet(link)
                retry_s, said = _LEAST_RETRY_S, ""
                await link.ended.wait()
            except (OSError, TimeoutError) as error:
                if str(error) != said:
                    said = str(error)
                    log.info("control: no connection with the driver at %s yet: %s", self._driver.address, error)
            finally:
                link.end("closed")
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _MOST_RETRY_S)

    async def _greet(self, link: Link) -> None:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await self._driver.connect(lambda: link)
            link.write(pack(self._session.greeting()))
            await link.greeting()

    def _take(self, link: Link, frame: dict[str, Any]) -> None:
        if self._session.link is not link:
            self._session.attach(link, checked_greeting(frame))
            link.greeted.set()
            self._on_connected()
            return
        message = self._session.take(frame)
        if message is not None:
            try:
                self._on_message(message)
            except Exception:
                log.exception("control: a message of the driver")

    def _end(self, link: Link, reason: str) -> None:
        if self._session.link is link:
            self._session.link = None
            log.info("control: connection with the driver: %s", reason)
            self._on_lost()
