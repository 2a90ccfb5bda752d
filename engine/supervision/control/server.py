"""The driver's end of the control wire: it listens, and knows its peers by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weft.comm.host_port import HandedOn, HostPort
from weft.engine.supervision.control.address import GREETED_WITHIN_S, Address, RowProgress
from weft.engine.supervision.control.frames import MOST_BYTES, pack
from weft.engine.supervision.control.link import Link
from weft.engine.supervision.control.session import Session, checked_greeting

MOST_GUESTS = 128
"""Connections that have not been greeted yet, 256 KiB each in a handshake; of more, the oldest is closed."""
_RETRY_S = 0.2

log = logging.getLogger(__name__)


class ControlServer:
    """Messages from and to peers that prove to be of this job; all calls on one asyncio loop.

    A message arrives once and in order, also over a connection that breaks and is made again, as
    long as both processes live. A peer's process that was started again begins anew: messages that the old one has not
    received are dropped.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[str, dict[str, Any]], None],
        on_lost: Callable[[str], None] = lambda peer: None,
        on_connected: Callable[[str], None] = lambda peer: None,
        most_bytes: int = MOST_BYTES,
        most_guests: int = MOST_GUESTS,
    ) -> None:
        """Create a server, which accepts connections from `listen` on.

        Args:
            on_message: called with the peer's name and its message.
            on_lost: called when a peer's connection has ended; the peer may reconnect.
            on_connected: called when a peer has connected or reconnected.
        """
        self._on_message, self._on_lost, self._on_connected = on_message, on_lost, on_connected
        self._most_bytes, self._most_guests = most_bytes, most_guests
        self._sessions: dict[str, Session] = {}
        self._peers: dict[Link, str] = {}
        self._guests: dict[asyncio.Task[None], None] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._port: HostPort | None = None
        self.refused = 0

    async def listen(self, address: Address) -> Address:
        """Begin to listen and return where, with the port that was taken for port 0.

        Raises:
            ValueError: the address cannot be bound, or it needs ``WEFT_KEY`` and there is none.
        """
        place = RowProgress.of(address)
        entrance = place.listen()
        if isinstance(entrance, HostPort):
            self._port = entrance
            entrance.take_handed(asyncio.get_running_loop(), lambda guest: self._receive(place, guest))
            self._accepting = asyncio.create_task(self._accept(place, entrance.listener))
            return entrance.address
        self._accepting = asyncio.create_task(self._accept(place, entrance))
        return address

    @property
    def connected(self) -> set[str]:
        """Names of the peers that have a connection."""
        return set(self._peers.values())

    def send(self, peer: str, message: dict[str, Any], *, latest_of: str = "") -> None:
        """Send ``message`` to ``peer``, now or when it comes.

        Args:
            latest_of: only the last of queued messages with the same ``latest_of`` has to arrive.

        Raises:
            ValueError: the message is too large.
        """
        self._session(peer).send(message, latest_of)

    def forget(self, peer: str) -> None:
        """Close the connection of ``peer``, and drop what waits for it."""
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
        for guest in list(self._guests):
            guest.cancel()
        for link in list(self._peers):
            link.finish()
        await asyncio.sleep(0)

    def _session(self, peer: str) -> Session:
        return self._sessions.setdefault(peer, Session(name="", most_bytes=self._most_bytes))

    async def _accept(self, place: RowProgress, listener: Any) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    guest, _ = await loop.sock_accept(listener)
                except OSError as error:  # too many files, or gone before it was greeted
                    log.warning("control: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._receive(place, guest, port=self._port)
                await asyncio.sleep(0)  # a connection that is there is accepted without one turn of the loop

    def _receive(self, place: RowProgress, guest: Any, port: HostPort | None = None) -> None:
        """Authenticate a new connection; one of ``port`` begins with a hello."""
        if len(self._guests) >= self._most_guests:
            oldest = next(iter(self._guests))
            del self._guests[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._greet(place, guest, port))
        self._guests[task] = None
        task.add_done_callback(lambda task: self._guests.pop(task, None))

    async def _greet(self, place: RowProgress, guest: Any, port: HostPort | None) -> None:
        """Require authentication and a greeting within `GREETED_WITHIN_S`."""
        link = Link(
            on_frame=self._take, on_tick=lambda: self._tick(link), on_end=self._end, most_bytes=self._most_bytes
        )
        guest.setblocking(False)
        try:
            async with asyncio.timeout(GREETED_WITHIN_S):
                if port is not None:
                    await port.answer(guest)
                await place.admit(guest, link)
                await link.greeting()
        except HandedOn:
            guest.close()
        except (OSError, TimeoutError, asyncio.CancelledError):
            self.refused += 1
            link.end("no greeting")
            guest.close()

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
        if before is not None:  # its end has not been noticed here
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
