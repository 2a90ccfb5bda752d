"""The driver's end of the control wire: a listener for agents, which are identified by name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from weft.comm.authenticated_socket import (
    HANDSHAKE_TIMEOUT_S,
    Address,
    AuthenticatedSocket,
    AuthenticatedTcpSocket,
    authenticated_socket,
)
from weft.comm.host_port import HandedOn, HostPort, Service
from weft.engine.supervision.control.frames import MOST_BYTES, pack
from weft.engine.supervision.control.link import Link
from weft.engine.supervision.control.session import Session, checked_greeting

MOST_UNKNOWN = 128
"""Connections that have not been greeted yet, 256 KiB each in a handshake; of more, the oldest is closed."""
_RETRY_S = 0.2

log = logging.getLogger(__name__)

Authentication = Callable[[socket.socket, Callable[[], Link]], Awaitable[Link]]


class ControlServer:
    """Messages to and from peers that prove to be of this job. All calls are on one asyncio loop.

    A message arrives once and in order while both processes live, even if the connection breaks and is reopened. A
    restarted peer begins a new session: messages that its previous process has not received are dropped.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[str, dict[str, Any]], None],
        on_lost: Callable[[str], None] = lambda peer: None,
        on_connected: Callable[[str], None] = lambda peer: None,
        most_bytes: int = MOST_BYTES,
        most_unknown: int = MOST_UNKNOWN,
    ) -> None:
        """Create a server that begins to accept connections with `listen`.

        Args:
            on_message: called with the peer's name and its message.
            on_lost: called when a peer's connection has ended; the peer may reconnect.
            on_connected: called when a peer has connected or reconnected.
        """
        self._on_message, self._on_lost, self._on_connected = on_message, on_lost, on_connected
        self._most_bytes, self._most_unknown = most_bytes, most_unknown
        self._sessions: dict[str, Session] = {}
        self._peers: dict[Link, str] = {}
        self._unknown: dict[asyncio.Task[None], None] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._port: HostPort | None = None
        self.refused = 0

    async def listen(self, address: Address) -> Address:
        """Begin to listen, and return the address, with the actual port if port 0 was requested.

        Raises:
            ValueError: the address cannot be bound, or it is a TCP address and ``WEFT_KEY`` is not set.
        """
        end = authenticated_socket(address, Service.CONTROL, listens=True)
        if isinstance(end, AuthenticatedTcpSocket):
            assert end.port is not None
            self._port = end.port
            self._port.take_handed(asyncio.get_running_loop(), partial(self._receive, end.authenticate_handed))
        self._accepting = asyncio.create_task(self._accept(end))
        return end.address

    @property
    def connected(self) -> set[str]:
        """Names of the peers that have a connection."""
        return set(self._peers.values())

    def send(self, peer: str, message: dict[str, Any], *, latest_of: str = "") -> None:
        """Send ``message`` to ``peer`` now or, if it is not connected, when it connects.

        Args:
            latest_of: only the last of queued messages with the same ``latest_of`` has to arrive.

        Raises:
            ValueError: the message is too large.
        """
        self._session(peer).send(message, latest_of)

    def forget(self, peer: str) -> None:
        """Close the connection of ``peer``, and drop messages that are queued for it."""
        session = self._sessions.pop(peer, None)
        if session is not None and session.link is not None:
            session.link.end("forgotten")

    async def close(self) -> None:
        """Send queued messages, and close all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            with suppress(asyncio.CancelledError):
                await self._accepting
        if self._port is not None:
            self._port.close()
        for task in list(self._unknown):
            task.cancel()
        for link in list(self._peers):
            link.finish()
        await asyncio.sleep(0)

    def _session(self, peer: str) -> Session:
        return self._sessions.setdefault(peer, Session(name="", most_bytes=self._most_bytes))

    async def _accept(self, end: AuthenticatedSocket) -> None:
        loop = asyncio.get_running_loop()
        assert end.listener is not None
        with end.listener as listener:
            while True:
                try:
                    peer, _ = await loop.sock_accept(listener)
                except OSError as error:  # too many open files, or the peer closed before the greeting
                    log.warning("control: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._receive(end.authenticate, peer)
                await asyncio.sleep(0)  # a waiting connection would be accepted without yielding to the event loop

    def _receive(self, authenticate: Authentication, peer: socket.socket) -> None:
        """Authenticate a new connection."""
        if len(self._unknown) >= self._most_unknown:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._greet(authenticate, peer))
        self._unknown[task] = None
        task.add_done_callback(lambda task: self._unknown.pop(task, None))

    async def _greet(self, authenticate: Authentication, peer: socket.socket) -> None:
        """Require authentication and a greeting within `HANDSHAKE_TIMEOUT_S`."""
        link = Link(
            on_frame=self._take, on_tick=lambda: self._tick(link), on_end=self._end, most_bytes=self._most_bytes
        )
        peer.setblocking(False)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await authenticate(peer, lambda: link)
                await link.greeting()
        except HandedOn:
            peer.close()
        except (OSError, TimeoutError, asyncio.CancelledError):
            self.refused += 1
            link.end("no greeting")
            peer.close()

    def _take(self, link: Link, frame: dict[str, Any]) -> None:
        if link not in self._peers:
            self._meet(link, frame)
            return
        peer = self._peers[link]
        message = self._sessions[peer].take(frame)
        if message is not None:
            try:
                self._on_message(peer, message)
            except Exception:
                log.exception("control: a message of %s", peer)

    def _meet(self, link: Link, frame: dict[str, Any]) -> None:
        greeting = checked_greeting(frame)
        peer = greeting["name"]
        session = self._session(peer)
        before = session.link
        if before is not None:  # the end of that connection has not been noticed here
            self._peers.pop(before, None)
            session.link = None
            before.end("connected anew")
            self._on_lost(peer)
        if session.theirs and session.theirs != greeting["session"]:
            session = self._sessions[peer] = Session(name="", most_bytes=self._most_bytes)
        self._peers[link] = peer
        answer = session.greeting() | {"of": greeting["session"]}
        if greeting["session"] != session.theirs:
            answer["received"] = 0
        link.write(pack(answer))
        session.attach(link, greeting)
        link.greeted.set()
        self._on_connected(peer)

    def _tick(self, link: Link) -> None:
        if link in self._peers:
            self._sessions[self._peers[link]].give_sign()

    def _end(self, link: Link, reason: str) -> None:
        peer = self._peers.pop(link, None)
        if peer is None:
            return
        session = self._sessions.get(peer)
        if session is not None and session.link is link:
            session.link = None
        log.info("control: %s: %s", peer, reason)
        self._on_lost(peer)
