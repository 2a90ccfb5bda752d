"""The transport of one endpoint: the native thread's functions, with Python's types and errors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple, Protocol

from weft.comm.channel import ChannelError
from weft.comm.wan.key import WanKey
from weft.comm.wan.library import Counters, Options, load, openssl


class Path(NamedTuple):
    """Where a message leaves to, or comes from: a linked peer, and a lane of that link."""

    peer: int
    lane: int


class State(IntEnum):
    """Of a request; the values are the transport's."""

    FAILED = -1
    PENDING = 0
    DONE = 1


@dataclass(frozen=True)
class LinkCounters:
    """What a link has carried so far.

    Attributes:
        sent_bytes: payload that the peer has acknowledged.
        received_bytes: payload that arrived whole.
        resent_chunks: chunks that a broken connection had carried, sent again over another.
        duplicate_chunks: chunks that had arrived already, and were dropped.
        broken: connections that were lost or replaced.
        ready: connections in use.
        rtt_s: shortest round trip of the link's own pings; 0 before the first.
    """

    sent_bytes: int
    received_bytes: int
    resent_chunks: int
    duplicate_chunks: int
    broken: int
    ready: int
    rtt_s: float


class Transfer(Hashable, Protocol):
    """What holds the memory that the transport reads or writes."""

    def ended(self) -> bool:
        """Whether the transport is done with that memory."""
        ...


class Transport:
    """The native thread of one endpoint; see `weft.comm.wan.WanEndpoint` for the arguments."""

    def __init__(
        self,
        *,
        rank: int,
        bind: str,
        port: int,
        key: WanKey,
        job: str,
        tls: bool,
        deadline_s: float,
        timeout_s: float,
        chunk_bytes: int,
        congestion: str,
    ) -> None:
        """Start it.

        Raises:
            ValueError: the address cannot be listened on, or the transport cannot be compiled.
        """
        self._library = load()
        authentication, encryption = key.derived("authentication"), key.derived("encryption")
        crypto, ssl = openssl()
        options = Options(
            id=rank, chunk_bytes=chunk_bytes, unsent_bytes=chunk_bytes, tls=tls, port=port,
            key_bytes=len(authentication), tls_key_bytes=len(encryption), deadline_s=deadline_s, patience_s=timeout_s,
            job=hashlib.sha256(job.encode()).digest(), host=bind.encode(), key=authentication, tls_key=encryption,
            congestion=congestion.encode(),
            crypto=crypto.encode(), ssl=ssl.encode(),
        )  # fmt: skip
        error = ctypes.create_string_buffer(512)
        self._native = self._library.weft_wan_open(ctypes.byref(options), error, len(error))
        if not self._native:
            raise ValueError(f"WAN endpoint of rank {rank}: {error.value.decode()}")
        self._rank, self._owner = rank, os.getpid()
        self._held: set[Transfer] = set()
        self._sweep_at = 256
        self._closer = weakref.finalize(self, _close, self._library, self._native, self._owner)

    def close(self, linger_s: float) -> None:
        """Send what is left, for at most ``linger_s``; say goodbye to the peers; end the thread."""
        if self._closer.detach():
            _close(self._library, self._native, self._owner, linger_s)
            self._native = None
            self._held.clear()

    def hold(self, transfer: Transfer) -> None:
        """Keep a transfer's memory until the transport is done with it."""
        if len(self._held) > self._sweep_at:  # some were never waited for, perhaps
            self._held = {other for other in self._held if not other.ended()}
            self._sweep_at = max(256, 2 * len(self._held))
        self._held.add(transfer)

    def let_go(self, transfer: Transfer) -> None:
        """The transfer has ended."""
        self._held.discard(transfer)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._library.weft_wan_port(self._open()))

    @property
    def refused(self) -> int:
        """Unauthenticated connections that were refused."""
        return int(self._library.weft_wan_refused(self._open()))

    def link(self, peer: int, name: str, address: tuple[str, int] | None, connections: int) -> None:
        """Name the link to ``peer``; where ``address`` is given, open its connections."""
        host, port = address or ("", 0)
        if self._library.weft_wan_link(self._open(), peer, name.encode(), host.encode(), port, connections):
            raise ValueError(f"WAN address {host!r} of rank {peer}: give an IP address")

    def open_lane(self, path: Path, buffer_bytes: int) -> None:
        """Let messages come in on ``path``."""
        self._library.weft_wan_lane(self._open(), *path, buffer_bytes)

    def relay(self, source: Path, target: Path, buffer_bytes: int) -> None:
        """Send on to ``target`` whatever comes from ``source``."""
        self._library.weft_wan_relay(self._open(), *source, *target, buffer_bytes)

    def use(self, peer: int, connections: int) -> None:
        """Send over the first ``connections`` of the link only."""
        self._library.weft_wan_use(self._open(), peer, connections)

    def counters(self, peer: int) -> LinkCounters:
        """What the link to ``peer`` has carried."""
        counters = Counters()
        self._library.weft_wan_counters(self._open(), peer, ctypes.byref(counters))
        return LinkCounters(**{field.name: getattr(counters, field.name) for field in fields(LinkCounters)})

    def send(self, path: Path, tag: bytes, turn: int, address: int, num_bytes: int) -> int:
        """Start sending memory; returns the request, which the caller must `free` once it has ended.

        Args:
            turn: of the messages that wait for one link, those of the least turn go first.
        """
        return self._library.weft_wan_send(self._open(), *path, tag, turn, address, num_bytes)

    def receive(self, path: Path, tag: bytes, address: int, num_bytes: int) -> int:
        """Start receiving into memory; returns the request, as `send` does."""
        return self._library.weft_wan_receive(self._open(), *path, tag, address, num_bytes)

    def wait(self, request: int, timeout_s: float) -> State:
        """Wait for a request to end."""
        return State(self._library.weft_wan_wait(self._open(), request, timeout_s))

    def error(self, request: int) -> str:
        """Why a request failed; empty if it did not."""
        return self._library.weft_wan_error(request).decode()

    def free(self, request: int) -> None:
        """Forget a request that has ended."""
        self._library.weft_wan_free(request)

    def _open(self) -> int:
        if self._native is None:
            raise ChannelError(f"the WAN endpoint of rank {self._rank} is closed")
        if os.getpid() != self._owner:
            raise ChannelError(
                f"the WAN endpoint of rank {self._rank} belongs to process {self._owner}, "
                "and this is a fork of it: make an endpoint of its own here, or start the process by spawn"
            )
        return self._native


def _close(library: ctypes.CDLL, native: int, owner: int, linger_s: float = 0.0) -> None:
    """End the native thread; a forked child has none, and its sockets are closed."""
    if os.getpid() == owner:
        library.weft_wan_close(native, linger_s)
