"""A proxy from this process's store client to the job's store. Other users and the network cannot reach either port."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar

from weft.comm import authenticated_socket
from weft.comm.authenticated_socket import (
    AuthenticatedSocket,
    AuthenticatedTcpSocket,
    AuthenticationError,
    Connection,
    P,
    connected,
    listen,
    open_connection,
)
from weft.comm.host_port import HostPort
from weft.conf.host.threads import Thread

MAX_UNAUTHENTICATED = 4096
"""Connections that have not authenticated themselves yet; further ones are closed."""
_RETRY_S = 0.2
_SO_ATTACH_FILTER = 26

log = logging.getLogger(__name__)

Opening = Callable[[type[Connection]], Awaitable[Connection]]
Authentication = Callable[[socket.socket, type[Connection]], Awaitable[Connection]]


class ProcessLocalPort:
    """A loopback port for torch's store that only this process can reach.

    The store has no authentication, and a loopback address is open to all users of the host. So a packet filter on the
    listening socket drops packets that do not come from connections of this process.
    """

    PROXY_HOST: ClassVar[str] = "127.0.0.2"
    """Address of rank 0's proxy: its own store client insists on the store's port number."""
    _HOST: ClassVar[str] = "127.0.0.1"
    _MAX_CONNECTIONS = 64

    def __init__(self, listener: socket.socket) -> None:
        """Take over a socket that is bound and does not listen yet."""
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self._filtered = listener.dup()
        self._connections: deque[socket.socket] = deque(maxlen=self._MAX_CONNECTIONS)
        self._filter()

    @classmethod
    def open(cls) -> ProcessLocalPort:
        """Open a free port."""
        listener = socket.socket()
        listener.bind((cls._HOST, 0))
        return cls(listener)

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Connect to the store, which must be listening."""
        connection = socket.socket()
        connection.bind((self._HOST, 0))
        self._connections.append(connection)
        self._filter()
        return await open_connection(await connected(connection, (self._HOST, self.port)), protocol)

    def _filter(self) -> None:
        """Accept only packets from 127.0.0.1 and the ports of connections made here, by classic BPF."""
        ports = [connection.getsockname()[1] for connection in self._connections if connection.fileno() >= 0]
        accept = len(ports) + 3
        program = [(0x20, 0, 0, 0xFFF0000C), (0x15, 0, len(ports) + 1, 0x7F000001), (0x28, 0, 0, 0)]  # address, port
        program += [(0x15, accept - at, 0, port) for at, port in enumerate(ports, start=3)]
        program += [(0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
        try:
            filled = struct.pack("HP", len(program), ctypes.addressof(code))
            self._filtered.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filled)
        except OSError as error:
            log.warning("other users of this host can reach the ranks' store: %s", error)


class LoopbackProxy:
    """A loopback port that forwards connections of this process to the store, on a thread of its own.

    The thread ends when this process has closed its last connection.
    """

    def __init__(self, connect: Opening, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Each accepted connection is forwarded to one that ``connect`` opens."""
        self._connect = connect
        self._own = listen(socket.AF_INET, (host, port))
        self.port: int = self._own.getsockname()[1]
        self._ready: deque[Connection] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._unauthenticated = self._local = 0
        self._loop = asyncio.new_event_loop()
        self._port: HostPort | None = None
        self._start(self._accept(self._own, self._check_own_process))
        Thread(self._run, name="weft-rendezvous").start()

    def also_accept(self, address: AuthenticatedSocket) -> None:
        """Forward the connections that ``address`` accepts and authenticates, too."""
        self._loop.call_soon_threadsafe(self._accept_for, address)

    def leave_port(self) -> None:
        """Stop accepting at the host's port. Another process listens there and passes on connections for the store."""
        self._loop.call_soon_threadsafe(self._leave_port)

    def _leave_port(self) -> None:
        port = self._port
        assert port is not None
        self._accepting.add_done_callback(lambda _: port.listener.close())
        self._accepting.cancel()

    def preconnect(self, timeout_s: float) -> None:
        """Open the first client's upstream connection now, so that a failure is raised here.

        Raises:
            ValueError: the process that listens there does not belong to this job.
            ConnectionError: nothing listened in time.
        """

        async def connect() -> None:
            self._ready.append(await self._connect_with_retries(timeout_s))

        try:
            asyncio.run_coroutine_threadsafe(connect(), self._loop).result()
        except AuthenticationError as error:
            raise ValueError(
                f"the rendezvous at MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT="
                f"{os.environ['MASTER_PORT']} belongs to another job ({error}); set "
                "the same WEFT_KEY on all hosts, or another port"
            ) from error

    async def _connect_with_retries(self, timeout_s: float) -> Connection:
        limit = self._loop.time() + timeout_s
        while True:
            try:
                return await self._connect(Connection)
            except AuthenticationError:
                raise
            except OSError as error:
                if self._loop.time() > limit:
                    raise ConnectionError(f"rank 0 did not listen within {timeout_s:g} s: {error}") from error
                await asyncio.sleep(_RETRY_S)

    def _run(self) -> None:
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        if self._port is not None:
            self._port.close()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept_for(self, address: AuthenticatedSocket) -> None:
        assert address.listener is not None
        self._accepting = self._start(self._accept(address.listener, address.authenticate))
        if isinstance(address, AuthenticatedTcpSocket):
            assert address.port is not None
            self._port = address.port
            self._port.take_handed(
                self._loop, lambda peer: self._start(self._serve(peer, address.authenticate_handed, own=False))
            )

    async def _accept(self, listener: socket.socket, authenticate: Authentication) -> None:
        with listener:
            while True:
                try:
                    client, _ = await self._loop.sock_accept(listener)
                except OSError as error:  # too many open files, or the client closed before it was accepted
                    log.warning("rendezvous: cannot accept a connection: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._start(self._serve(client, authenticate, own=listener is self._own))
                await asyncio.sleep(0)  # handle each connection before accepting the next, even when many are waiting

    async def _serve(self, client: socket.socket, authenticate: Authentication, *, own: bool) -> None:
        client.setblocking(False)
        with client, suppress(OSError, TimeoutError):
            if self._unauthenticated >= MAX_UNAUTHENTICATED:
                return
            self._unauthenticated += 1
            try:
                async with asyncio.timeout(authenticated_socket.HANDSHAKE_TIMEOUT_S):
                    known = await authenticate(client, Connection)
            finally:
                self._unauthenticated -= 1
            try:
                await self._pass_on(known, own=own)
            finally:
                known.transport.abort()

    async def _pass_on(self, client: Connection, *, own: bool) -> None:
        upstream = (
            self._ready.popleft()
            if self._ready
            else await self._connect_with_retries(authenticated_socket.HANDSHAKE_TIMEOUT_S)
        )
        self._local += own
        try:
            await self._forward(client, upstream)
        finally:
            upstream.transport.abort()
            self._local -= own
            if own and not self._local:
                self._loop.stop()  # this process has closed its store

    async def _forward(self, client: Connection, upstream: Connection) -> None:
        client.forward_to(upstream)
        upstream.forward_to(client)
        await asyncio.wait((client.lost, upstream.lost), return_when=asyncio.FIRST_COMPLETED)

    async def _check_own_process(self, client: socket.socket, protocol: Callable[[], P]) -> P:
        """Accept the connection if its other end is an open file of this process.

        Raises AuthenticationError if the other end belongs to another process.
        """
        there, here = client.getpeername(), client.getsockname()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _ends(int(name)) == [there, here]:
                    return await open_connection(client, protocol)
        raise AuthenticationError("another process")


def _ends(file: int) -> list[tuple[str, int]]:
    """Return a TCP socket's own and peer address, IPv4 unmapped from IPv6; or an empty list for other sockets."""
    with socket.socket(fileno=os.dup(file)) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6):
            return []
        return [(host.removeprefix("::ffff:"), port) for host, port, *_ in (end.getsockname(), end.getpeername())]
