"""The control connection of driver and agents: small JSON messages, authenticated. This module loads without torch."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
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
from weft.conf.host.diagnosis import CheckResult, Outcome
from weft.engine.supervision.connection import MOST_BYTES, Link, Session, checked_greeting, pack

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


MOST_UNKNOWN = 128
"""Connections that have not been greeted yet, 256 KiB each in a handshake; of more, the oldest is closed."""
_RETRY_S = 0.2
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


CLOCK_CLIENT = "clock of "
"""Prefix of the names of peers that only request the time and are no agents."""
_SAMPLES = 8
MOST_S = 1.0
"""Greatest offset in seconds that passes."""


def answer_clock(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the driver's answer to a request of `clock_offset`, or None for other messages."""
    requested = message.get("clock")
    return {"clock": requested, "at": time.time()} if isinstance(requested, int) else None


async def clock_offset(address: Address, most_s: float = 5.0) -> tuple[float, float]:
    """Return the seconds by which this host's clock is ahead of the driver's, and the maximum error of this value.

    The answer with the shortest round trip is used. Its error is at most half of that round trip.

    Raises:
        ValueError: the address is a TCP address, and ``WEFT_KEY`` is not set.
        TimeoutError: no answer in ``most_s`` seconds.
    """
    answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    name = f"{CLOCK_CLIENT}{socket.gethostname()} {os.getpid()}"
    client = ControlClient(address, name=name, on_message=answers.put_nowait)
    client.start()
    offset, uncertain = 0.0, float("inf")
    try:
        async with asyncio.timeout(most_s):
            for number in range(_SAMPLES):
                requested = time.time()
                client.send({"clock": number})
                while (answer := await answers.get()).get("clock") != number:
                    pass
                answered = time.time()
                if (answered - requested) / 2 < uncertain:
                    uncertain = (answered - requested) / 2
                    offset = (requested + answered) / 2 - float(answer["at"])
    finally:
        with suppress(Exception):
            await client.close()
    return offset, uncertain


def check_clock(driver: str, shift_s: float = 0.0) -> CheckResult:
    """Check the difference between this host's clock and the driver's.

    Args:
        driver: ``HOST:PORT`` or the name of a Unix socket.
        shift_s: seconds to add to this host's clock, for tests.
    """
    try:
        offset, uncertain = asyncio.run(clock_offset(_address(driver)))
    except (TimeoutError, OSError) as error:
        return CheckResult("clock", Outcome.failed, f"the driver at {driver} does not answer {error}".strip())
    offset += shift_s
    outcome = Outcome.passed if abs(offset) - uncertain <= MOST_S else Outcome.failed
    side = "ahead of" if offset >= 0 else "behind"
    says = f"{abs(offset) * 1e3:.1f} ms {side} the driver's, to {uncertain * 1e3:.1f} ms"
    return CheckResult("clock", outcome, says, offset, "s")


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else text
