"""A connection of the control wire: frames in both directions, and heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from weft.engine.supervision.control.frames import MOST_BYTES, FrameError, Frames

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
        """Create the protocol object that `loop.create_connection` expects."""
        self._on_frame, self._on_tick, self._on_end = on_frame, on_tick, on_end
        self._frames, self._buffer = Frames(most_bytes), memoryview(bytearray(_READ_BYTES))
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._heard = self._loop.time()
        self._reason = ""
        self.greeted, self.ended = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._heard = self._ticked = self._written = self._loop.time()
        self._timer = self._loop.call_later(PING_S, self._tick)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`. Over TLS asyncio writes to slices of the buffer."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._heard = self._loop.time()
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
        """Wait for the peer's greeting.

        Raises:
            ConnectionError: the connection ended before the greeting.
        """
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
            self._heard = now
        self._ticked = now
        if now - self._heard > SILENCE_S:
            self.end(f"silent for {SILENCE_S:g} s")
        else:
            self._on_tick()
