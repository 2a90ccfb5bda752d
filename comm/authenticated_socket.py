"""Mutually authenticated sockets between processes of a job."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol, TypeVar

from weft.comm.host_port import HostPort, Service, family_of, port_hello
from weft.comm.key import WanKey, contexts
from weft.conf.host.processes import peer_process

RUN = "WEFT_RUN"
"""Environment variable of supervised ranks that identifies their run among others on the same machine."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that a peer has to connect and to authenticate itself."""
HELD_BYTES = 1 << 16
"""Maximum number of bytes that a connection may send before its peer is authenticated."""


P = TypeVar("P", bound=asyncio.BaseProtocol)


class Connection(asyncio.Protocol):
    """One end of a decrypted connection. It forwards the data that it receives to another `Connection`.

    Forwarding is a callback of the event loop. A task for each direction would take several times as long, and one loop
    serves the connections of all ranks to rank 0's store.

    Attributes:
        transport: asyncio's transport to the peer.
        lost: done when the connection has ended.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        """Create an unconnected end; requires a running event loop."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held = bytearray()
        self._source: Connection | None = None
        self._target: Connection | None = None

    def forward_to(self, target: Connection) -> None:
        """Forward all data to ``target``, buffered data first. Reading pauses while its send buffer is full."""
        self._target, target._source = target, self
        target.transport.write(bytes(self._held))
        self._held.clear()
        self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. See `asyncio.Protocol`, also for the methods below."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Forward ``data``. Without a target, buffer it, and pause reading once `HELD_BYTES` are buffered."""
        if self._target is not None:
            self._target.transport.write(data)
            return
        self._held += data
        if len(self._held) >= HELD_BYTES:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """Pause reading from the source, because the peer reads more slowly."""
        if self._source is not None:
            self._source.transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the source."""
        if self._source is not None:
            self._source.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Complete `lost`."""
        if not self.lost.done():
            self.lost.set_result(None)


class AuthenticationError(ConnectionError):
    """The other side is not a process of this job."""


Address = str | tuple[str, int]
"""Name of an abstract Unix socket, whose peer's user the kernel reports; or the IP address and shared TCP port of a
host, where a connection begins with a hello and both sides prove ``WEFT_KEY`` in a TLS handshake."""


class AuthenticatedSocket(Protocol):
    """An address at which processes of a job connect to one of them, with mutual authentication.

    Attributes:
        listener: the listening socket, on the side that accepts.
    """

    listener: socket.socket | None

    @property
    def address(self) -> Address:
        """The address, with the actual port if port 0 was requested."""

    async def authenticate(self, peer: socket.socket, protocol: Callable[[], P]) -> P:
        """Authenticate the peer of an accepted connection, and give the connection to a new ``protocol``.

        Raises:
            AuthenticationError: the peer is not a process of this job.
            OSError: the peer closed the connection.
        """
        ...

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Open an authenticated connection to the side that accepts.

        Raises:
            AuthenticationError: what listens there is not a process of this job.
            OSError: nothing listens there.
        """
        ...


def authenticated_socket(address: Address, service: Service, *, listens: bool) -> AuthenticatedSocket:
    """Return the authenticated socket for a service of the job at ``address``, and listen there if ``listens``.

    Raises:
        ValueError: the address cannot be bound, or a TCP address is used without ``WEFT_KEY``.
    """
    if isinstance(address, str):
        return AuthenticatedUnixSocket(address, service, listens=listens)
    return AuthenticatedTcpSocket(address, service, listens=listens)


class AuthenticatedUnixSocket:
    """An abstract Unix socket; the kernel reports the user of the peer."""

    def __init__(self, name: str, service: Service = Service.RENDEZVOUS, *, listens: bool) -> None:
        self.address: Address = name
        self._name = "\0" + name
        self.listener = listen(socket.AF_UNIX, self._name, service) if listens else None

    async def authenticate(self, peer: socket.socket, protocol: Callable[[], P]) -> P:
        """Accept the peer if it is a process of this user."""
        _, user = peer_process(peer)
        if user != os.getuid():
            raise AuthenticationError(f"user {user}")
        return await open_connection(peer, protocol)

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Connect if a process of this user listens."""
        connection = await connected(socket.socket(socket.AF_UNIX), self._name)
        try:
            return await self.authenticate(connection, protocol)
        except BaseException:
            connection.close()
            raise


class AuthenticatedTcpSocket:
    """A host's shared TCP port: a hello, then mutual TLS 1.3 with a certificate that both sides derive from the key.

    Attributes:
        port: this process's `HostPort`, if it listens.
    """

    def __init__(self, address: tuple[str, int], service: Service = Service.RENDEZVOUS, *, listens: bool) -> None:
        self._key, self._service = WanKey.from_environment(), service
        self._accepting, self._connecting = contexts(self._key, f"{service.name.lower()} certificate")
        self.address = address
        self.port: HostPort | None = None
        self.listener: socket.socket | None = None
        if listens:
            try:
                self.port = HostPort(address, service, self._key)
            except OSError as error:
                raise _cannot_listen(service, address, error) from error
            self.address, self.listener = self.port.address, self.port.listener

    async def authenticate(self, peer: socket.socket, protocol: Callable[[], P]) -> P:
        """Read the hello, then authenticate both sides in a TLS handshake."""
        assert self.port is not None
        await self.port.answer(peer)
        return await self.authenticate_handed(peer, protocol)

    async def authenticate_handed(self, peer: socket.socket, protocol: Callable[[], P]) -> P:
        """Authenticate a connection whose hello another process has read."""
        try:
            return await open_connection(peer, protocol, self._accepting, server_side=True)
        except ssl.SSLError as error:
            raise AuthenticationError("another key") from error

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Send a hello, then authenticate both sides in a TLS handshake."""
        connection = await connected(socket.socket(family_of(self.address)), self.address)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await asyncio.get_running_loop().sock_sendall(connection, port_hello(self._key, self._service))
                return await open_connection(connection, protocol, self._connecting)
        except ssl.SSLError as error:
            connection.close()
            raise AuthenticationError("another key") from error
        except BaseException:
            connection.close()
            raise


async def open_connection(
    end: socket.socket, protocol: Callable[[], P], context: ssl.SSLContext | None = None, *, server_side: bool = False
) -> P:
    """Give a connected socket to a new ``protocol``, which then owns it.

    Raises:
        ssl.SSLError: the peer's certificate differs from that of ``context``, or it does not use TLS.
        OSError: the peer closed the connection.
    """
    loop = asyncio.get_running_loop()
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if server_side:
        _, connection = await loop.connect_accepted_socket(protocol, end, ssl=context)
    else:
        name = None if context is None else ""
        _, connection = await loop.create_connection(protocol, sock=end, ssl=context, server_hostname=name)
    return connection


def listen(
    family: socket.AddressFamily, address: str | tuple[str, int], service: Service = Service.RENDEZVOUS
) -> socket.socket:
    """Return a non-blocking listening socket. Raise ValueError if the address cannot be bound."""
    listener = socket.socket(family)
    if family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(service, address[1:] if isinstance(address, str) else address, error) from error
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener


def _cannot_listen(service: Service, address: Address, error: OSError) -> ValueError:
    where = address if isinstance(address, str) else ":".join(map(str, address))
    if service is Service.CONTROL:
        return ValueError(
            f"the run's supervisor cannot listen at {where}: {error.strerror}; end what is there, or set another "
            "supervise.port"
        )
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
