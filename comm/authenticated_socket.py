"""Sockets on which both ends find out whether the other is a process of the same job."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol

from weft.comm.wan.key import WanKey

RUN = "WEFT_RUN"
"""Environment variable of supervised ranks: tells their run from others on the same machine."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that a peer has to connect and to authenticate itself."""
_PROOF_BYTES = 32


class AuthenticationError(ConnectionError):
    """The other side is not a process of this job."""


class AuthenticatedSocket(Protocol):
    """An address at which the ranks of a job connect to rank 0, and prove to each other that they belong to it."""

    listener: socket.socket | None
    """On the side that accepts."""

    async def authenticate(self, peer: socket.socket) -> None:
        """Check who is at the other end of an accepted connection.

        Raises:
            AuthenticationError: not a process of this job.
        """
        ...

    async def connect(self) -> socket.socket:
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

    async def authenticate(self, peer: socket.socket) -> None:
        """Accept processes of this user."""
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise AuthenticationError(f"user {user}")

    async def connect(self) -> socket.socket:
        """Connect, if this user's process listens."""
        connection = socket.socket(socket.AF_UNIX)
        return await connected(connection, self._name, lambda: self.authenticate(connection))


class AuthenticatedTcpSocket:
    """A TCP port at which both sides prove that they hold the job's key; the key itself is never sent."""

    def __init__(self, address: tuple[str, int], *, listens: bool) -> None:
        """Listen at ``address``, or remember it for `connect`.

        Raises:
            ValueError: there is no key, or the address cannot be bound.
        """
        self._key = WanKey.from_environment().derived("store")
        self.address = address
        self.listener = None
        if listens:
            self.listener = listen(_family(address), address)
            self.address = self.listener.getsockname()[:2]

    async def authenticate(self, peer: socket.socket) -> None:
        """Prove the key, and have the peer prove it."""
        theirs = await _receive(peer, _PROOF_BYTES)
        mine = secrets.token_bytes(_PROOF_BYTES)
        await asyncio.get_running_loop().sock_sendall(peer, mine + self._proof(b"server", theirs, mine))
        if not hmac.compare_digest(await _receive(peer, _PROOF_BYTES), self._proof(b"client", theirs, mine)):
            raise AuthenticationError("another key")

    async def connect(self) -> socket.socket:
        """Connect, have the server prove the key, and prove it in turn."""
        connection = socket.socket(_family(self.address))
        return await connected(connection, self.address, lambda: self._authenticate_server(connection))

    async def _authenticate_server(self, connection: socket.socket) -> None:
        loop, mine = asyncio.get_running_loop(), secrets.token_bytes(_PROOF_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_sendall(connection, mine)
        reply = await _receive(connection, 2 * _PROOF_BYTES)
        theirs, proof = reply[:_PROOF_BYTES], reply[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"server", mine, theirs)):
            raise AuthenticationError("another key")
        await loop.sock_sendall(connection, self._proof(b"client", mine, theirs))

    def _proof(self, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        return hmac.digest(self._key, role + client_nonce + server_nonce, "sha256")


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
        where = address[1:] if isinstance(address, str) else ":".join(map(str, address))
        raise ValueError(
            f"the ranks cannot meet at {where}: {error.strerror}; stop what listens there, or set another "
            "cluster.master_port (or MASTER_PORT)"
        ) from error
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener


async def connected(
    connection: socket.socket, address: str | tuple[str, int], check: Callable[[], Awaitable[None]]
) -> socket.socket:
    """Connect within `HANDSHAKE_TIMEOUT_S`, and return the socket if ``check`` passes."""
    connection.setblocking(False)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(connection, address)
            await check()
    except BaseException:
        connection.close()
        raise
    return connection


def _family(address: tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


async def _receive(peer: socket.socket, length: int) -> bytes:
    """Exactly ``length`` bytes.

    Raises:
        AuthenticationError: the connection was closed before.
    """
    received = b""
    while len(received) < length:
        more = await asyncio.get_running_loop().sock_recv(peer, length - len(received))
        if not more:
            raise AuthenticationError("it closed the connection")
        received += more
    return received
