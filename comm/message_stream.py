"""Messages between two processes of a job on different hosts: blocking, over mutual TLS with the job's key.

Nothing is read as a message, and so nothing can be unpickled, before the peer has proved ``WEFT_KEY``.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import BoundedSemaphore, Timer
from time import monotonic, sleep

from weft.comm.host_port import family_of
from weft.comm.key import WanKey, contexts
from weft.conf.host.threads import Thread

HANDSHAKE_S = 5.0
"""Seconds that a peer has to connect and to authenticate itself."""
STALL_S = 30.0
"""Seconds without progress within a message after which the peer is lost."""
MOST_BYTES = 2**32
"""Longest message: the hidden states of the largest chunks."""
RETRY_S = 0.5
"""Seconds between attempts to connect."""
MAX_HANDSHAKES = 64
"""Connections that are authenticated at a time; further ones are closed."""
FIRST_BYTES = 2**20
"""Memory of a message before any of it has arrived. It grows with what arrives."""
_LENGTH = struct.Struct("<Q")

log = logging.getLogger(__name__)


class MessageStream:
    """An authenticated, encrypted connection. One thread at a time may send, and one may receive."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the connection is lost, or the peer reads nothing for `STALL_S`.
        """
        self._connection.sendall(_LENGTH.pack(len(message)))
        self._connection.sendall(message)

    def receive(self, *, limit_s: float | None = None, most: int = MOST_BYTES) -> bytearray:
        """Return the next message, of at most ``most`` bytes. It begins within ``limit_s``, if that is given.

        Raises:
            OSError: the connection is lost, the peer is silent, or the message is longer.
        """
        self._connection.settimeout(limit_s)
        begin = self._read(1)
        self._connection.settimeout(STALL_S)
        (length,) = _LENGTH.unpack(begin + self._read(_LENGTH.size - 1))
        if length > most:
            why = "use the same version of Weft on both hosts"
            raise ConnectionError(f"a message of {length} bytes, and the limit is {most}; {why}")
        return self._read(length)

    def close(self) -> None:
        """Close the connection; other threads that use it get an OSError."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int) -> bytearray:
        data, done = bytearray(min(count, FIRST_BYTES)), 0
        while done < count:
            if done == len(data):
                data.extend(bytes(min(count, 2 * done) - done))
            try:
                read = self._connection.recv_into(memoryview(data)[done:])
            except TimeoutError as error:
                silent_s = self._connection.gettimeout()
                raise ConnectionError(f"the peer has sent nothing for {silent_s:g} s") from error
            if not read:
                raise ConnectionError("the peer has closed the connection")
            done += read
        return data


def connect(host: str, port: int, purpose: str, *, limit_s: float) -> MessageStream:
    """Connect to a `Listener` for the same ``purpose``, which may begin to listen within ``limit_s``.

    Raises:
        ValueError: the listener has another key.
        ConnectionError: nothing has listened in time.
    """
    _, context = contexts(WanKey.from_environment(), _certificate(purpose))
    deadline_s = monotonic() + limit_s
    while True:
        try:
            plain = socket.create_connection((host, port), HANDSHAKE_S)
            return _secured(plain, context, is_server=False)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(f"{host}:{port} has another WEFT_KEY; set the same on all hosts") from error
        except OSError as error:
            if monotonic() > deadline_s:
                raise ConnectionError(f"{host}:{port} has not answered within {limit_s:.0f} s: {error}") from error
        sleep(RETRY_S)


class Listener:
    """Listens on a port of its own, and authenticates each connection on a thread.

    Attributes:
        address: the IP address and the port.
    """

    def __init__(self, host: str, port: int, purpose: str, welcome: Callable[[MessageStream], None]) -> None:
        """Listen. ``welcome`` is called on the thread of each authenticated connection; port 0 takes a free one.

        Raises:
            OSError: the address cannot be bound.
        """
        self._context, _ = contexts(WanKey.from_environment(), _certificate(purpose))
        self._welcome, self._handshakes = welcome, BoundedSemaphore(MAX_HANDSHAKES)
        self._listener = socket.create_server((host, port), family=family_of((host, port)))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        Thread(self._accept, name="weft-listener").start()

    def _accept(self) -> None:
        while True:
            try:
                plain, peer = self._listener.accept()
            except OSError as error:  # too many open files
                log.warning("cannot accept a connection: %s", error)
                sleep(RETRY_S)
                continue
            if self._handshakes.acquire(blocking=False):
                Thread(self._authenticate, plain, peer[0], name="weft-connection").start()
            else:
                plain.close()

    def _authenticate(self, plain: socket.socket, peer: str) -> None:
        try:
            stream = _secured(plain, self._context, is_server=True)
        except OSError as error:
            log.warning("refused a connection from %s: %s", peer, error)
            return
        finally:
            self._handshakes.release()
        self._welcome(stream)


def address_towards(host: str, port: int) -> str:
    """Return this host's IP address on its route to ``host``.

    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    family, kind, *_, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # looks up the route; sends nothing
        return probe.getsockname()[0]


def _secured(plain: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> MessageStream:
    """Return the stream, once both sides have proved the key. Raise OSError if that takes more than `HANDSHAKE_S`."""
    plain.settimeout(HANDSHAKE_S)
    connection = context.wrap_socket(plain, server_side=is_server, do_handshake_on_connect=False)
    limit = Timer(HANDSHAKE_S, _cut, (connection,))
    limit.start()
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.do_handshake()
        # In TLS 1.3 a client is done before its certificate has been verified; only the server's byte shows that.
        if is_server:
            connection.sendall(b"\0")
        elif connection.recv(1) != b"\0":
            raise ConnectionError("the peer has closed the connection")
        connection.settimeout(STALL_S)
    except BaseException:
        connection.close()
        raise
    finally:
        limit.cancel()
    return MessageStream(connection)


def _cut(connection: ssl.SSLSocket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _certificate(purpose: str) -> str:
    return f"{purpose} certificate"
