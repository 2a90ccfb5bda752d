"""The one TCP port of a host for other hosts, which several processes of a run share.

All of them listen there, and the kernel gives a connection to any of them. So a connection begins with an unencrypted
*hello* of 96 bytes, which names the recipient and proves the job's key. A process passes a connection for another
recipient to that process. A rank's endpoint (`comm/wan/shared_port.hpp`) is named by attempt and rank, all others by a
`Service`. See docs/decisions/one-port.md.
"""

from __future__ import annotations

import array
import asyncio
import hmac
import os
import secrets
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from time import monotonic, sleep

from weft.comm.key import WanKey

HELLO_BYTES = 96
_SIGNED = struct.Struct("<8s16sII32s")  # magic, attempt, recipient, 0, random bytes; their HMAC follows
_MAGIC = b"weftdoor"
_NO_ATTEMPT = bytes(16)
_SENDER = struct.Struct("3i")  # process, user, group
_WAIT_S, _LOOK_S = 1.0, 0.01
"""Seconds to wait for a name that an ending process of this run still has, and seconds between attempts."""
_MOST_OTHER_KEYS, _OTHER_KEYS_WITHIN_S = 64, 5.0
"""Limit of handshakes with peers that have another key, within the time limit of one handshake."""


class Service(IntEnum):
    """Recipients of connections other than endpoints; the numbers are above all ranks."""

    RENDEZVOUS = 0xFFFFFFFE
    CONTROL = 0xFFFFFFFF


class HandedOn(ConnectionError):
    """A connection was for another process, and has been passed to it."""


def port_hello(key: WanKey, service: Service) -> bytes:
    """Return the first bytes of a connection to ``service``. They are valid once."""
    signed = _SIGNED.pack(_MAGIC, _NO_ATTEMPT, service, 0, secrets.token_bytes(32))
    return signed + _proof(key, signed)


class HostPort:
    """A service's share of its host's port: gets connections from the kernel and from other processes there.

    Its sockets are closed in a forked child.

    Attributes:
        address: the IP address and port on which it listens.
        listener: accepts connections whose hello `answer` has to read.
    """

    def __init__(self, address: tuple[str, int], service: Service, key: WanKey) -> None:
        """Listen on a port that other processes of this user may share; port 0 takes a free one.

        Raises:
            OSError: the address cannot be bound, or another process already provides this service there.
        """
        self._service, self._key = service, key
        self._heard: set[bytes] = set()  # random bytes of hellos; only holders of the key can add to it
        self._other_keys: deque[float] = deque(maxlen=_MOST_OTHER_KEYS)
        self._loop: asyncio.AbstractEventLoop | None = None
        with ExitStack() as undo:
            self.listener = undo.enter_context(_kept_from_children(socket.socket(family_of(address))))
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if address[1]:
                self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.listener.bind(address)
            self.address: tuple[str, int] = self.listener.getsockname()[:2]
            self._mailbox = undo.enter_context(claim(self.address[1], service))
            self.listener.listen(socket.SOMAXCONN)
            self.listener.setblocking(False)
            undo.pop_all()

    async def answer(self, connection: socket.socket) -> None:
        """Read the hello of a connection from `listener`, and pass it on if it is for another process.

        The caller still closes ``connection``. A peer with another key proceeds to the handshake, so that both sides
        can report it, unless many such peers came just now: the buffers of a handshake take 256 KiB.

        Args:
            connection: a non-blocking socket; nothing beyond the hello is read.

        Raises:
            HandedOn: the connection was passed to another process.
            ConnectionError: the peer sent no valid hello, or its recipient is not on this host.
        """
        heard = b""
        while len(heard) < HELLO_BYTES:
            more = await asyncio.get_running_loop().sock_recv(connection, HELLO_BYTES - len(heard))
            heard += more
            if not more or heard[: len(_MAGIC)] != _MAGIC[: len(heard)]:
                raise ConnectionError("it sent no valid hello")
        signed, proof = heard[: _SIGNED.size], heard[_SIGNED.size :]
        _, attempt, whom, _, random = _SIGNED.unpack(signed)
        if not hmac.compare_digest(_proof(self._key, signed), proof):
            self._admit_other_key()
            return
        if random in self._heard:
            raise ConnectionError("this hello was used before")
        self._heard.add(random)
        if (attempt, whom) == (_NO_ATTEMPT, self._service):
            return
        name = _service_name(self.address[1], whom) if attempt == _NO_ATTEMPT else f"weft-wan-{whom}-{attempt.hex()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fileno()]))
            while True:
                try:
                    sender.sendmsg([b"\0"], [rights], socket.MSG_NOSIGNAL, "\0" + name)  # ConnectionRefusedError: none
                    break
                except BlockingIOError:  # its mailbox has ten connections, and the caller has a time limit
                    await asyncio.sleep(_LOOK_S)
        raise HandedOn(name)

    def _admit_other_key(self) -> None:
        """Count a peer that has another key."""
        now = monotonic()
        if len(self._other_keys) == _MOST_OTHER_KEYS and now - self._other_keys[0] < _OTHER_KEYS_WITHIN_S:
            raise ConnectionError("many peers with another key")
        self._other_keys.append(now)

    def take_handed(self, loop: asyncio.AbstractEventLoop, welcome: Callable[[socket.socket], object]) -> None:
        """Call ``welcome`` with each connection that another process passes on. Call this on the running ``loop``."""
        self._loop = loop
        loop.add_reader(self._mailbox, self._take_all, welcome)

    def close(self) -> None:
        """Leave the port. Call this on the loop of `take_handed`, after the last accept from `listener`."""
        if self._loop is not None:
            self._loop.remove_reader(self._mailbox)
        self._mailbox.close()
        self.listener.close()

    def _take_all(self, welcome: Callable[[socket.socket], object]) -> None:
        room = socket.CMSG_SPACE(4) + socket.CMSG_SPACE(_SENDER.size)
        while True:
            try:
                _, parts, _, _ = self._mailbox.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
            except OSError:  # no more messages
                return
            connections, user = [], -1
            for _, kind, data in parts:
                if kind == socket.SCM_RIGHTS:
                    connections = [socket.socket(fileno=number) for (number,) in struct.iter_unpack("i", data)]
                elif kind == socket.SCM_CREDENTIALS:
                    _, user, _ = _SENDER.unpack(data)
            for connection in connections:
                if user != os.geteuid():
                    connection.close()
                    continue
                connection.setblocking(False)
                welcome(connection)


def claim(port: int, service: Service | str) -> socket.socket:
    """Reserve ``service`` at ``port`` on this host for this process, until the returned socket is closed.

    Retries for `_WAIT_S`, because a process that is about to end may still have the reservation.

    Raises:
        OSError: another process has the reservation.
    """
    mailbox = _kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    mailbox.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    mailbox.setblocking(False)
    limit = monotonic() + _WAIT_S
    while True:
        try:
            mailbox.bind("\0" + _service_name(port, service))
            return mailbox
        except OSError:
            if monotonic() > limit:
                mailbox.close()
                raise
        sleep(_LOOK_S)


def family_of(address: tuple[str, int]) -> socket.AddressFamily:
    """Return the address family of an IP address and a port."""
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _service_name(port: int, service: int | str) -> str:
    return f"weft-port-{port}-{service if isinstance(service, str) else int(service)}"


def _proof(key: WanKey, signed: bytes) -> bytes:
    return hmac.digest(key.derived("door"), signed, "sha256")


_KEPT: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _kept_from_children(made: socket.socket) -> socket.socket:
    """Return ``made``, to be closed in forked children, which could otherwise block the port after this process."""
    _KEPT.add(made)
    return made


def _forked() -> None:
    for inherited in list(_KEPT):
        inherited.close()


os.register_at_fork(after_in_child=_forked)
