"""Where a driver listens, and how both sides of a connection know each other there."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from dataclasses import dataclass

from weft.comm.control.certificate import contexts
from weft.comm.control.link import Link
from weft.comm.wan.key import WanKey

Address = str | tuple[str, int]
"""A name of this host's Unix sockets, where the kernel says which user is at the other end; or an IP
address and a TCP port, where both sides prove ``WEFT_KEY`` in a TLS handshake."""
KNOCK_S = 5.0
"""Seconds for connecting, the handshake and the greeting."""


class Refused(ConnectionError):
    """The other side is no process of this job."""


@dataclass(frozen=True)
class Place:
    """An address, and what is needed to talk there."""

    address: Address
    listening: ssl.SSLContext | None
    connecting: ssl.SSLContext | None

    @classmethod
    def of(cls, address: Address) -> Place:
        """The place at ``address``.

        Raises:
            ValueError: a TCP address and no ``WEFT_KEY``, or one that is too short.
        """
        if isinstance(address, str):
            return cls(address, None, None)
        return cls(address, *contexts(WanKey.from_environment()))

    def listen(self) -> socket.socket:
        """A listening socket.

        Raises:
            ValueError: the address cannot be had.
        """
        unix = isinstance(self.address, str)
        listener = socket.socket(socket.AF_UNIX if unix else _family(self.address))
        if not unix:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind("\0" + self.address if isinstance(self.address, str) else self.address)
        except OSError as error:
            listener.close()
            raise ValueError(
                f"the run's supervisor cannot listen at {self.address}: {error.strerror}; end what is there, or set "
                "another supervise.port"
            ) from error
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
        return listener

    async def admit(self, guest: socket.socket, link: Link) -> None:
        """Find out who came, and put ``link`` on the connection.

        Raises:
            OSError: no process of this job, or it went away.
        """
        await self._wrap(guest, link, self.listening, server_side=True)

    async def enter(self, link: Link) -> None:
        """Connect, and put ``link`` on the connection.

        Raises:
            OSError: nobody is there, or no process of this job.
        """
        unix = isinstance(self.address, str)
        inside = socket.socket(socket.AF_UNIX if unix else _family(self.address))
        inside.setblocking(False)
        try:
            target = "\0" + self.address if isinstance(self.address, str) else self.address
            await asyncio.get_running_loop().sock_connect(inside, target)
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
            await loop.connect_accepted_socket(lambda: link, end)  # either end: all it asks for is a connected socket
            return
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server_side:
            await loop.connect_accepted_socket(lambda: link, end, ssl=context, ssl_handshake_timeout=KNOCK_S)
        else:
            await loop.create_connection(
                lambda: link, sock=end, ssl=context, server_hostname="", ssl_handshake_timeout=KNOCK_S
            )


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
