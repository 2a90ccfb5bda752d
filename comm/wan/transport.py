"""A typed Python wrapper around the native transport of one endpoint."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from weft.comm.channel import ChannelError
from weft.comm.key import WanKey
from weft.comm.links import LinkCounters
from weft.comm.wan.library import Counters, Options, load, openssl


class Path(NamedTuple):
    """A peer and a lane of the link to it."""

    peer: int
    lane: int


class State(IntEnum):
    """State of a request, as in transport.cpp."""

    FAILED = -1
    PENDING = 0
    DONE = 1


class InFlight(Hashable, Protocol):
    """A transfer whose memory the transport reads or writes."""

    def ended(self) -> bool:
        """True if the transport has finished with that memory."""
        ...


class Transport:
    """The native thread of one endpoint; see `weft.comm.wan.WanEndpoint` for the arguments."""

    def __init__(self, rank: int, key: WanKey, job: str, *, shares_port: bool = False, **settings: Any) -> None:
        """Start the thread.

        Args:
            shares_port: True if all connections begin with a hello to a host's shared port.
            settings: further fields of `Options`.

        Raises:
            ValueError: the address cannot be bound, or the transport cannot be compiled.
        """
        self._library = load()
        authentication, encryption = key.derived("authentication"), key.derived("encryption")
        port_key = key.derived("door") if shares_port else b""
        crypto, ssl = openssl()
        options = Options(
            id=rank, job=hashlib.sha256(job.encode()).digest(),
            key=authentication, key_bytes=len(authentication), tls_key=encryption, tls_key_bytes=len(encryption),
            port_key=port_key, port_key_bytes=len(port_key), crypto=crypto.encode(), ssl=ssl.encode(), **settings,
        )  # fmt: skip
        error = ctypes.create_string_buffer(512)
        self._native = self._library.weft_wan_open(ctypes.byref(options), error, len(error))
        if not self._native:
            raise ValueError(f"WAN endpoint of rank {rank}: {error.value.decode()}")
        self._rank, self._owner = rank, os.getpid()
        self._held: set[InFlight] = set()
        self._calls = threading.Condition()  # held during calls, except for those that wait
        self._waiting = 0
        self._sweep_at = 256
        self._closer = weakref.finalize(self, _close, self._library, self._native, self._owner)

    def close(self, linger_s: float) -> None:
        """Send queued data, for at most ``linger_s``, close the links and stop the thread."""
        if self._closer.detach():
            native, self._native = self._native, None
            if os.getpid() == self._owner:
                with self._calls:
                    self._calls.wait_for(lambda: not self._waiting)  # other threads' waits fail within their next poll
            _close(self._library, native, self._owner, linger_s)
            self._held.clear()

    def retain(self, transfer: InFlight) -> None:
        """Keep a transfer alive until the transport has finished with its memory."""
        with self._calls:
            self._sweep()
            self._held.add(transfer)

    def _sweep(self) -> None:
        if len(self._held) > self._sweep_at:  # some may never have been waited for
            self._held = {other for other in self._held if not other.ended()}
            self._sweep_at = max(256, 2 * len(self._held))

    def release(self, transfer: InFlight) -> None:
        """Release a finished transfer."""
        with self._calls:
            self._held.discard(transfer)

    @property
    def port(self) -> int:
        """The port that the endpoint listens on."""
        with self._using() as native:
            return int(self._library.weft_wan_port(native))

    @property
    def refused(self) -> int:
        """Number of connections that were refused."""
        with self._using() as native:
            return int(self._library.weft_wan_refused(native))

    def link(self, peer: int, name: str, address: tuple[str, int] | None, connections: int) -> None:
        """Create the link to ``peer``; with an ``address``, this side opens the connections."""
        host, port = address or ("", 0)
        with self._using() as native:
            failed = self._library.weft_wan_link(native, peer, name.encode(), host.encode(), port, connections)
        if failed:
            raise ValueError(f"WAN address {host!r} of rank {peer}: give an IP address")

    def open_lane(self, path: Path, buffer_bytes: int) -> None:
        """Accept messages on ``path``."""
        with self._using() as native:
            self._library.weft_wan_lane(native, *path, buffer_bytes)

    def relay(self, source: Path, target: Path, buffer_bytes: int) -> None:
        """Forward all messages from ``source`` to ``target``."""
        with self._using() as native:
            self._library.weft_wan_relay(native, *source, *target, buffer_bytes)

    def use(self, peer: int, connections: int) -> None:
        """Send over the first ``connections`` of the link only."""
        with self._using() as native:
            self._library.weft_wan_use(native, peer, connections)

    def counters(self, peer: int) -> LinkCounters:
        """Return the counters of the link to ``peer``."""
        counters = Counters()
        with self._using() as native:
            self._library.weft_wan_counters(native, peer, ctypes.byref(counters))
        return LinkCounters(**{field.name: getattr(counters, field.name) for field in fields(LinkCounters)})

    def send(self, path: Path, tag: bytes, priority: int, address: int, num_bytes: int) -> int:
        """Start sending memory and return the request, which the caller must `free` when it is finished.

        Args:
            priority: among the messages queued for one link, lower goes first.
        """
        with self._using() as native:
            return self._library.weft_wan_send(native, *path, tag, priority, address, num_bytes)

    def receive(self, path: Path, tag: bytes, address: int, num_bytes: int) -> int:
        """Start receiving into memory and return the request, which the caller must `free` when it is finished."""
        with self._using() as native:
            return self._library.weft_wan_receive(native, *path, tag, address, num_bytes)

    def wait(self, request: int, timeout_s: float) -> State:
        """Wait for a request and return its state. It is pending after a time-out."""
        with self._using() as native:
            self._waiting += 1
        try:
            return State(self._library.weft_wan_wait(native, request, timeout_s))
        finally:
            with self._calls:
                self._waiting -= 1
                self._calls.notify_all()

    def error(self, request: int) -> str:
        """Return the error of a failed request, otherwise an empty string."""
        return self._library.weft_wan_error(request).decode()

    def free(self, request: int) -> None:
        """Free a finished request."""
        self._library.weft_wan_free(request)

    @contextmanager
    def _using(self) -> Iterator[int]:
        """Yield the native endpoint, and prevent other threads from closing it meanwhile."""
        self._open()
        with self._calls:
            yield self._open()

    def _open(self) -> int:
        if self._native is None:
            raise ChannelError(f"the WAN endpoint of rank {self._rank} is closed")
        if os.getpid() != self._owner:
            raise ChannelError(
                f"the WAN endpoint of rank {self._rank} belongs to process {self._owner}, "
                "of which this is a fork; create an endpoint here, or start the process with spawn"
            )
        return self._native


def _close(library: ctypes.CDLL, native: int, owner: int, linger_s: float = 0.0) -> None:
    """Stop the native thread. In a forked child there is none to stop, and the sockets are closed already."""
    if os.getpid() == owner:
        library.weft_wan_close(native, linger_s)
