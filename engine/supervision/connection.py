"""A connection between driver and agent: frames of JSON, heartbeats, and a session that outlives connections."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec

from weft.conf.host.documents import nests_deeper

MOST_BYTES = 1 << 20
"""Maximum size of a frame, by default."""
MOST_DEPTH = 32
"""Maximum nesting depth of containers."""
_LENGTH_BYTES = 4
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = msgspec.json.Decoder(dict[str, Any])


class FrameError(ValueError):
    """The peer sent an invalid frame."""


def pack(value: dict[str, Any], most_bytes: int = MOST_BYTES) -> bytes:
    """Serialize ``value`` as a frame.

    Raises:
        ValueError: the frame is too large, or contains a number that is not finite.
        TypeError: ``value`` contains a type that JSON does not support.
    """
    data = _ENCODER.encode(value).encode(errors="replace")  # file names may have surrogates, which JSON does not allow
    if len(data) > most_bytes:
        raise ValueError(f"a control message of {len(data)} bytes; the most is {most_bytes}")
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Frames:
    """Decodes a byte stream into JSON objects."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Refuse frames longer than ``most_bytes`` as soon as their length is read."""
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[dict[str, Any]]:
        """Yield the objects that ``data`` completes.

        Raises:
            FrameError: a frame is too long, nested too deeply, or no JSON object.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
            if end - _LENGTH_BYTES > self._most_bytes:
                raise FrameError(f"a message of {end - _LENGTH_BYTES} bytes; the most is {self._most_bytes}")
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield _parsed(frame)


def _parsed(frame: bytes) -> dict[str, Any]:
    if nests_deeper(frame, MOST_DEPTH):
        raise FrameError(f"a message of more than {MOST_DEPTH} containers inside of each other")
    try:
        return _DECODER.decode(frame)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"no JSON object: {str(error)[:100]}") from error


PING_S = 2.0
"""Seconds between heartbeats on a connection."""
SILENCE_S = 7.0
"""Seconds without a heartbeat after which a connection is closed."""
_READ_BYTES = 4096
MOST_UNSENT_BYTES = 8 << 20
"""Maximum number of unread bytes of a peer before its connection is closed."""


class Link(asyncio.BufferedProtocol):
    """Calls ``on_frame`` with each JSON object, ``on_tick`` periodically, and ``on_end`` with the reason of the end.

    Data is read into one small buffer, because asyncio would allocate 256 KiB for each read, which takes longer than
    processing a heartbeat.

    Attributes:
        greeted: set when the peer's greeting has been read.
        ended: set when the connection has ended.
    """

    def __init__(
        self,
        *,
        on_frame: Callable[[Link, dict[str, Any]], None],
        on_tick: Callable[[], None],
        on_end: Callable[[Link, str], None],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._on_frame, self._on_tick, self._on_end = on_frame, on_tick, on_end
        self._frames, self._buffer = Frames(most_bytes), memoryview(bytearray(_READ_BYTES))
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received_at = self._loop.time()
        self._reason = ""
        self.greeted, self.ended = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._received_at = self._ticked = self._written = self._loop.time()
        self._timer = self._loop.call_later(PING_S, self._tick)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`. Over TLS asyncio writes to slices of the buffer."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._received_at = self._loop.time()
        try:
            for frame in self._frames.feed(self._buffer[:nbytes]):
                if self._reason:
                    return
                self._on_frame(self, frame)
        except FrameError as error:
            self.end(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._timer.cancel()
        self._transport = None
        self.ended.set()
        self._on_end(self, self._reason or str(error or "the peer hung up"))

    async def greeting(self) -> None:
        """Wait for the peer's greeting. Raise ConnectionError if the connection ended before the greeting."""
        waiting = [asyncio.create_task(event.wait()) for event in (self.greeted, self.ended)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if not self.greeted.is_set():
            raise ConnectionError(self._reason or "the peer hung up before it greeted")

    def write(self, frame: bytes) -> None:
        """Send ``frame``. The connection ends if the peer leaves too much data unread."""
        if self._transport is None or self._reason:
            return
        self._written = self._loop.time()
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            self.end("the peer does not read")

    def end(self, reason: str) -> None:
        """Close the connection immediately. ``on_end`` is called with ``reason``."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """Close the connection when the written data has been sent."""
        self._reason = self._reason or "closed"
        if self._transport is not None:
            with suppress(RuntimeError):
                self._transport.close()

    @property
    def quiet(self) -> bool:
        """True if this side has sent nothing for about one heartbeat interval, so that a heartbeat is due."""
        return self._loop.time() - self._written >= PING_S / 2

    def _tick(self) -> None:
        self._timer = self._loop.call_later(PING_S, self._tick)
        now = self._loop.time()
        if now - self._ticked > 2 * PING_S:  # this process was stopped, so the silence is not the peer's
            self._received_at = now
        self._ticked = now
        if now - self._received_at > SILENCE_S:
            self.end(f"silent for {SILENCE_S:g} s")
        else:
            self._on_tick()


MOST_WAITING_BYTES = 64 << 20
"""Maximum number of bytes of messages that the peer has not acknowledged."""
_ACKNOWLEDGED_EVERY = 32
log = logging.getLogger(__name__)


class Session:
    """Messages to and from a peer. They are numbered, kept until acknowledged, and resent over the next connection.

    A restarted process is a new session, which begins with the messages that were not acknowledged.
    """

    def __init__(self, *, name: str, most_bytes: int = MOST_BYTES) -> None:
        """Begin a session. ``name`` identifies this side to the peer."""
        self.link: Link | None = None
        self.theirs = ""
        self._name, self._most_bytes = name, most_bytes
        self._mine = secrets.token_hex(8)
        self._number = self._received = self._acknowledged_number = 0
        self._waiting: OrderedDict[int, bytes] = OrderedDict()
        self._latest: dict[str, int] = {}
        self._waiting_bytes = 0

    def greeting(self) -> dict[str, Any]:
        """Return the first message of either side: its identity, and the number of messages that it has received."""
        return {"name": self._name, "session": self._mine, "of": self.theirs, "received": self._received}

    def attach(self, link: Link, greeting: dict[str, Any]) -> None:
        """Continue over ``link``, whose peer sent ``greeting``. Resend messages that the peer has not received."""
        if greeting["session"] != self.theirs:
            self.theirs, self._received = greeting["session"], 0
        self.link, self._acknowledged_number = link, self._received
        if greeting["of"] == self._mine:
            self._acknowledged(greeting["received"])
        for frame in self._waiting.values():
            link.write(frame)

    def send(self, message: dict[str, Any], latest_of: str = "") -> None:
        """Send ``message`` now or, without a connection, when there is one.

        Args:
            latest_of: only the last of messages with the same ``latest_of`` has to arrive.

        The queue for an absent peer is bounded. When it is full, the oldest messages are dropped.

        Raises:
            ValueError: the message is too large.
        """
        frame = pack({"number": self._number + 1, "message": message}, self._most_bytes)
        if latest_of:
            self._drop(self._latest.get(latest_of, 0))
        if self._waiting_bytes + len(frame) > MOST_WAITING_BYTES:
            log.warning("control: %d messages of %s wait; the oldest is given up", len(self._waiting), self._name)
            self._drop(next(iter(self._waiting)))
        self._number += 1
        if latest_of:
            self._latest[latest_of] = self._number
        self._waiting[self._number] = frame
        self._waiting_bytes += len(frame)
        if self.link is not None:
            self.link.write(frame)

    def take(self, frame: dict[str, Any]) -> dict[str, Any] | None:
        """Return the message in a frame, or None if there is none or it was received before.

        Raises:
            FrameError: the frame is neither a message nor an acknowledgement.
        """
        number, message = frame.get("number"), frame.get("message")
        if number is None and isinstance(frame.get("received"), int):
            self._acknowledged(frame["received"])
            return None
        if not isinstance(number, int) or not isinstance(message, dict):
            raise FrameError("neither a message nor an acknowledgement")
        if number <= self._received:
            return None
        self._received = number
        if number - self._acknowledged_number >= _ACKNOWLEDGED_EVERY:
            self.acknowledge()
        return message

    def give_sign(self) -> None:
        """Send a heartbeat and an acknowledgement, unless the peer has received both recently."""
        if self.link is not None and (self.link.quiet or self._acknowledged_number != self._received):
            self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge the received messages."""
        self._acknowledged_number = self._received
        if self.link is not None:
            self.link.write(pack({"received": self._received}))

    def _acknowledged(self, number: int) -> None:
        while self._waiting and next(iter(self._waiting)) <= number:
            self._drop(next(iter(self._waiting)))

    def _drop(self, number: int) -> None:
        self._waiting_bytes -= len(self._waiting.pop(number, b""))


def checked_greeting(frame: dict[str, Any]) -> dict[str, Any]:
    """Return ``frame`` if it is a greeting as `Session.greeting` returns it.

    Raises:
        FrameError: the frame is no such greeting.
    """
    kinds = {"name": str, "session": str, "of": str, "received": int}
    if any(not isinstance(frame.get(key), kind) for key, kind in kinds.items()) or not frame["session"]:
        raise FrameError("no greeting")
    return frame
