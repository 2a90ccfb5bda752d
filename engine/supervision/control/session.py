"""A session between two processes: messages in order and exactly once, over successive connections."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from typing import Any

from weft.engine.supervision.control.frames import MOST_BYTES, FrameError, pack
from weft.engine.supervision.control.link import Link

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
        self._number = self._received = self._told = 0
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
        self.link, self._told = link, self._received
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
        if number - self._told >= _ACKNOWLEDGED_EVERY:
            self.acknowledge()
        return message

    def give_sign(self) -> None:
        """Send a heartbeat and an acknowledgement, unless the peer has received both recently."""
        if self.link is not None and (self.link.quiet or self._told != self._received):
            self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge the received messages."""
        self._told = self._received
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
