"""The address of a driver, and the authentication of both sides of a connection to it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from dataclasses import dataclass

from weft.comm.certificate import contexts
from weft.comm.host_port import HostPort, Service, family_of, port_hello
from weft.comm.key import WanKey
from weft.engine.supervision.control.link import Link

Address = str | tuple[str, int]
"""Name of an abstract Unix socket, whose peer's user the kernel reports; or the IP address and shared TCP port of a
host, where a connection begins with a hello and both sides prove ``WEFT_KEY`` in a TLS handshake."""
GREETED_WITHIN_S = 5.0
"""Seconds for connecting, the handshake and the greeting."""


class Refused(ConnectionError):
    """The peer is not a process of this job."""


@dataclass(frozen=True)
class RowProgress:
    """An address with its key and TLS contexts."""

    address: Address
    key: WanKey | None
    listening: ssl.SSLContext | None
    connecting: ssl.SSLContext | None

    @classmethod
    def of(cls, address: Address) -> RowProgress:
        """Derive the TLS contexts for ``address``.

        Raises:
            ValueError: a TCP address and no ``WEFT_KEY``, or one that is too short.
        """
        if isinstance(address, str):
            return cls(address, None, None, None)
        key = WanKey.from_environment()
        return cls(address, key, *contexts(key))

    def listen(self) -> socket.socket | HostPort:
        """Listen on a Unix socket, or on the host's shared port.

        Raises:
            ValueError: the address cannot be bound.
        """
        try:
            if self.key is not None:
                assert not isinstance(self.address, str)
                return HostPort(self.address, Service.CONTROL, self.key)
            assert isinstance(self.address, str)
            return _unix_listener(self.address)
        except OSError as error:
            raise ValueError(
                f"the run's supervisor cannot listen at {self.address}: {error.strerror}; end what is there, or set "
                "another supervise.port"
            ) from error

    async def admit(self, guest: socket.socket, link: Link) -> None:
        """Authenticate an accepted connection, and attach ``link`` to it.

        Raises:
            OSError: the peer is not a process of this job, or it has closed the connection.
        """
        await self._wrap(guest, link, self.listening, server_side=True)

    async def enter(self, link: Link) -> None:
        """Connect, authenticate, and attach ``link`` to the connection.

        Raises:
            OSError: no process listens, or it is not of this job.
        """
        inside = socket.socket(socket.AF_UNIX if isinstance(self.address, str) else family_of(self.address))
        inside.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(inside, "\0" + self.address if isinstance(self.address, str) else self.address)
            if self.key is not None:
                await loop.sock_sendall(inside, port_hello(self.key, Service.CONTROL))
            await self._wrap(inside, link, self.connecting, server_side=False)
        except BaseException:
            inside.close()
            raise

    async def _wrap(self, end: socket.socket, link: Link, context: ssl.SSLContext | None, *, server_side: bool) -> None:
        loop = asyncio.get_running_loop()
        if end.family == socket.AF_UNIX:
            _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                raise Refused(f"user {user}")
            await loop.connect_accepted_socket(
                lambda: link, end
            )  # works for both ends: it needs a connected socket only
            return
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server_side:
            await loop.connect_accepted_socket(lambda: link, end, ssl=context, ssl_handshake_timeout=GREETED_WITHIN_S)
        else:
            await loop.create_connection(
                lambda: link, sock=end, ssl=context, server_hostname="", ssl_handshake_timeout=GREETED_WITHIN_S
            )


def _unix_listener(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name)
    except OSError:
        listener.close()
        raise
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener
