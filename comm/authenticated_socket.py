"""Sockets on which both ends find out whether the other is a process of the same job."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from typing import Protocol

from weft.comm.control.certificate import RENDEZVOUS, contexts
from weft.comm.host_port import HostPort, Service, family_of, knock
from weft.comm.wan.key import WanKey

RUN = "WEFT_RUN"
"""Environment variable of supervised ranks: tells their run from others on the same machine."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that a peer has to connect and to authenticate itself."""
HELD_BYTES = 1 << 16
"""Most bytes that a connection may send before its peer is authenticated."""


class Connection(asyncio.Protocol):
    """An end of a connection, in the clear for its user, which forwards what it receives to another.

    Forwarding is a callback of the event loop: a task for each direction would take several times as long, and rank
    0's store is asked through one loop by all ranks.

    Attributes:
        transport: to the peer.
        lost: done when the connection has ended.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        """Not connected yet; in a running event loop."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held = bytearray()
        self._source: Connection | None = None
        self._target: Connection | None = None

    def forward_to(self, target: Connection) -> None:
        """From now on, and what has come so far; while ``target``'s buffer is full, nothing is read."""
        self._target, target._source = target, self
        target.transport.write(bytes(self._held))
        self._held.clear()
        self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`, as for the others."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Forward, or hold as much as a reader may."""
        if self._target is not None:
            self._target.transport.write(data)
            return
        self._held += data
        if len(self._held) >= HELD_BYTES:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The peer is slower than who sends to it."""
        if self._source is not None:
            self._source.transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        if self._source is not None:
            self._source.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell who waits for `lost`."""
        if not self.lost.done():
            self.lost.set_result(None)


class AuthenticationError(ConnectionError):
    """The other side is not a process of this job."""


class AuthenticatedSocket(Protocol):
    """An address at which the ranks of a job connect to rank 0, and prove to each other that they belong to it."""

    listener: socket.socket | None
    """On the side that accepts."""

    async def authenticate(self, peer: socket.socket) -> Connection:
        """Check who is at the other end of an accepted connection, which the result then owns.

        Raises:
            AuthenticationError: not a process of this job.
            OSError: it went away.
        """
        ...

    async def connect(self) -> Connection:
        """An authenticated connection to the side that accepts.

        Raises:
            AuthenticationError: what listens there is not a process of this job.
            OSError: nothing listens there.
        """
        ...


class AuthenticatedUnixSocket:
    """An abstract Unix socket; the kernel says which user is at the other end."""

    def __init__(self, name: str, *, listens: bool) -> None:
        """Listen at ``name``, or remember it for `connect`.

        Raises:
            ValueError: another process listens there.
        """
        self._name = "\0" + name
        self.listener = listen(socket.AF_UNIX, self._name) if listens else None

    async def authenticate(self, peer: socket.socket) -> Connection:
        """Accept processes of this user."""
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise AuthenticationError(f"user {user}")
        return await open_connection(peer)

    async def connect(self) -> Connection:
        """Connect, if this user's process listens."""
        connection = await connected(socket.socket(socket.AF_UNIX), self._name)
        try:
            return await self.authenticate(connection)
        except BaseException:
            connection.close()
            raise


class AuthenticatedTcpSocket:
    """A host's TCP port, where one knocks, with mutual TLS 1.3 by a certificate that both sides derive from the key.

    Attributes:
        port: this process's part in the port, if it listens.
    """

    def __init__(self, address: tuple[str, int], *, listens: bool) -> None:
        """Listen at ``address``, or remember it for `connect`.

        Raises:
            ValueError: there is no key, or the address cannot be bound.
        """
        self._key = WanKey.from_environment()
        self._accepting, self._connecting = contexts(self._key, RENDEZVOUS)
        self.address = address
        self.port: HostPort | None = None
        self.listener: socket.socket | None = None
        if listens:
            try:
                self.port = HostPort(address, Service.RENDEZVOUS, self._key)
            except OSError as error:
                raise _cannot_meet(":".join(map(str, address)), error) from error
            self.address, self.listener = self.port.address, self.port.listener

    async def authenticate(self, peer: socket.socket) -> Connection:
        """Hear the knock, prove the key, and have the peer prove it."""
        assert self.port is not None
        await self.port.answer(peer)
        return await self.authenticate_handed(peer)

    async def authenticate_handed(self, peer: socket.socket) -> Connection:
        """The same of a connection that another process has handed on."""
        try:
            return await open_connection(peer, self._accepting, server_side=True)
        except ssl.SSLError as error:
            raise AuthenticationError("another key") from error

    async def connect(self) -> Connection:
        """Connect, have the server prove the key, and prove it in turn."""
        connection = await connected(socket.socket(family_of(self.address)), self.address)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await asyncio.get_running_loop().sock_sendall(connection, knock(self._key, Service.RENDEZVOUS))
                return await open_connection(connection, self._connecting)
        except ssl.SSLError as error:
            connection.close()
            raise AuthenticationError("another key") from error
        except BaseException:
            connection.close()
            raise


async def open_connection(
    end: socket.socket, context: ssl.SSLContext | None = None, *, server_side: bool = False
) -> Connection:
    """The connection of a connected socket, which it owns from now on.

    Raises:
        ssl.SSLError: the other side has another certificate than ``context``, or speaks something else.
        OSError: it went away.
    """
    loop = asyncio.get_running_loop()
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if server_side:
        _, connection = await loop.connect_accepted_socket(Connection, end, ssl=context)
    else:
        name = None if context is None else ""
        _, connection = await loop.create_connection(Connection, sock=end, ssl=context, server_hostname=name)
    return connection


def listen(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
    """A non-blocking listening socket.

    Raises:
        ValueError: the address cannot be bound.
    """
    listener = socket.socket(family)
    if family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_meet(address[1:] if isinstance(address, str) else ":".join(map(str, address)), error) from error
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener


def _cannot_meet(where: str, error: OSError) -> ValueError:
    return ValueError(
        f"the ranks cannot meet at {where}: {error.strerror}; stop what listens there, or set another "
        "cluster.master_port (or MASTER_PORT)"
    )


async def connected(connection: socket.socket, address: str | tuple[str, int]) -> socket.socket:
    """Connect within `HANDSHAKE_TIMEOUT_S`."""
    connection.setblocking(False)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection
