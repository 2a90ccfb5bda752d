"""The way into the ranks' store: doors that know who knocks, and a thread that carries the bytes of those let in."""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from weft.comm.wan.key import WanKey

KNOCK_S = 5.0
"""Seconds that a guest has to say who it is."""
MOST_GUESTS = 4096
"""Who have not said yet; the next one is turned away."""
_PIECE = 1 << 16
_RETRY_S = 0.2
_PROOF = 32
_SO_ATTACH_FILTER = 26

log = logging.getLogger(__name__)


class Refused(ConnectionError):
    """The other side is no rank of this job."""


class Door(Protocol):
    """Where the ranks of a job come in."""

    listener: socket.socket | None

    async def admit(self, guest: socket.socket) -> None:
        """Find out who knocks.

        Raises:
            Refused: no rank of this job.
        """
        ...

    async def enter(self) -> socket.socket:
        """A connection to the rank that has the store.

        Raises:
            OSError: nobody is there, or it is another's door.
        """
        ...


class CredentialDoor:
    """A Unix socket without a file; the kernel says which user is at the other end."""

    def __init__(self, name: str, *, listens: bool) -> None:
        """Listen at ``name``, or know it.

        Raises:
            ValueError: another process listens there.
        """
        self._name = "\0" + name
        self.listener = _listen(socket.AF_UNIX, self._name) if listens else None

    async def admit(self, guest: socket.socket) -> None:
        """Let this user's processes in."""
        _, user, _ = struct.unpack("3i", guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise Refused(f"user {user}")

    async def enter(self) -> socket.socket:
        """Connect, to this user's process only."""
        inside = socket.socket(socket.AF_UNIX)
        return await _checked(inside, self._name, lambda: self.admit(inside))


class KeyDoor:
    """A TCP port at which both sides prove that they have the job's key, which never travels."""

    def __init__(self, address: tuple[str, int], *, listens: bool) -> None:
        """Listen at ``address``, or know it.

        Raises:
            ValueError: no key, or the address cannot be had.
        """
        self._key = WanKey.from_environment().derived("store")
        self.address = address
        self.listener = None
        if listens:
            self.listener = _listen(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, address)
            self.address = self.listener.getsockname()[:2]

    async def admit(self, guest: socket.socket) -> None:
        """Prove the key, and have the guest prove it."""
        theirs = await _receive(guest, _PROOF)
        mine = secrets.token_bytes(_PROOF)
        await asyncio.get_running_loop().sock_sendall(guest, mine + self._proof(b"door", theirs, mine))
        if not hmac.compare_digest(await _receive(guest, _PROOF), self._proof(b"guest", theirs, mine)):
            raise Refused("another key")

    async def enter(self) -> socket.socket:
        """Connect, and prove the key to who proves it."""
        inside = socket.socket(socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET)
        return await _checked(inside, self.address, lambda: self._knock(inside))

    async def _knock(self, inside: socket.socket) -> None:
        loop, mine = asyncio.get_running_loop(), secrets.token_bytes(_PROOF)
        inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_sendall(inside, mine)
        said = await _receive(inside, 2 * _PROOF)
        theirs, proof = said[:_PROOF], said[_PROOF:]
        if not hmac.compare_digest(proof, self._proof(b"door", mine, theirs)):
            raise Refused("another key")
        await loop.sock_sendall(inside, self._proof(b"guest", mine, theirs))

    def _proof(self, role: bytes, guests: bytes, doors: bytes) -> bytes:
        return hmac.digest(self._key, role + guests + doors, "sha256")


class Vault:
    """The port at which torch's store hears this process alone.

    The store knows no password, and other users of the host reach a loopback address. So the
    listening socket drops, in the kernel, what does not come from ports that this process holds.
    """

    SIDE: ClassVar[str] = "127.0.0.2"
    """Where the store's own client goes, for it takes the store's port on another address: to the gateway."""
    _INSIDE: ClassVar[str] = "127.0.0.1"
    _RECENT = 64

    def __init__(self, listener: socket.socket) -> None:
        """Take a socket that is bound and does not listen yet."""
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self._filtered = listener.dup()
        self._recent: deque[socket.socket] = deque(maxlen=self._RECENT)
        self._filter()

    @classmethod
    def open(cls) -> Vault:
        """A vault at a free port."""
        listener = socket.socket()
        listener.bind((cls._INSIDE, 0))
        return cls(listener)

    async def enter(self) -> socket.socket:
        """A connection to the store; it must have begun to listen."""
        inside = socket.socket()
        inside.bind((self._INSIDE, 0))
        self._recent.append(inside)
        self._filter()
        return await _checked(inside, (self._INSIDE, self.port), _nothing)

    def _filter(self) -> None:
        """Admit packets of 127.0.0.1 from the ports of connections made here, by classic BPF."""
        ports = [inside.getsockname()[1] for inside in self._recent if inside.fileno() >= 0]
        yes = len(ports) + 3
        program = [(0x20, 0, 0, 0xFFF0000C), (0x15, 0, len(ports) + 1, 0x7F000001), (0x28, 0, 0, 0)]  # address, port
        program += [(0x15, yes - at, 0, port) for at, port in enumerate(ports, start=3)]
        program += [(0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
        try:
            filled = struct.pack("HP", len(program), ctypes.addressof(code))
            self._filtered.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filled)
        except OSError as error:
            log.warning("other users of this host can reach the ranks' store: %s", error)


class Gateway:
    """A loopback port of this process, behind which is the store, and the thread that carries the bytes.

    The thread ends with the last connection of this process.
    """

    def __init__(
        self, enter: Callable[[], Awaitable[socket.socket]], *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """Listen; ``enter`` connects to what is behind."""
        self._enter = enter
        self._own = _listen(socket.AF_INET, (host, port))
        self.port: int = self._own.getsockname()[1]
        self._ready: deque[socket.socket] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._guests = self._local = 0
        self._loop = asyncio.new_event_loop()
        self._listen(self._own, self._is_mine)
        threading.Thread(target=self._run, name="weft-rendezvous", daemon=True).start()

    def open_door(self, door: Door) -> None:
        """Let the guests of ``door`` in as well."""
        assert door.listener is not None
        self._loop.call_soon_threadsafe(self._listen, door.listener, door.admit)

    def try_way(self, timeout_s: float) -> None:
        """Come in once, so that what keeps this process out is said here.

        Raises:
            ValueError: the other side is no rank of this job.
            ConnectionError: nobody opened in time.
        """

        async def first() -> None:
            self._ready.append(await self._enter_patiently(timeout_s))

        try:
            asyncio.run_coroutine_threadsafe(first(), self._loop).result()
        except Refused as error:
            raise ValueError(
                f"the ranks' meeting place at MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT="
                f"{os.environ['MASTER_PORT']} is another's ({error}); set the same WEFT_KEY everywhere, or another port"
            ) from error

    async def _enter_patiently(self, timeout_s: float) -> socket.socket:
        limit = self._loop.time() + timeout_s
        while True:
            try:
                return await self._enter()
            except Refused:
                raise
            except OSError as error:
                if self._loop.time() > limit:
                    raise ConnectionError(f"rank 0 was not there within {timeout_s:g} s: {error}") from error
                await asyncio.sleep(_RETRY_S)

    def _run(self) -> None:
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self, listener: socket.socket, admit: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._start(self._accept(listener, admit))

    async def _accept(self, listener: socket.socket, admit: Callable[[socket.socket], Awaitable[None]]) -> None:
        with listener:
            while True:
                try:
                    guest, _ = await self._loop.sock_accept(listener)
                except OSError as error:  # too many files, or gone before it was greeted
                    log.warning("the ranks' meeting place: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._start(self._serve(guest, admit, own=listener is self._own))

    async def _serve(
        self, guest: socket.socket, admit: Callable[[socket.socket], Awaitable[None]], *, own: bool
    ) -> None:
        guest.setblocking(False)
        with guest, suppress(OSError, TimeoutError):
            if self._guests >= MOST_GUESTS:
                return
            self._guests += 1
            try:
                async with asyncio.timeout(KNOCK_S):
                    await admit(guest)
            finally:
                self._guests -= 1
            with self._ready.popleft() if self._ready else await self._enter_patiently(KNOCK_S) as inside:
                self._local += own
                try:
                    await self._carry(guest, inside)
                finally:
                    self._local -= own
                    if own and not self._local:
                        self._loop.stop()  # this process has given its store up

    async def _carry(self, one: socket.socket, other: socket.socket) -> None:
        for end in (one, other):
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        done = self._loop.create_future()
        for source, target in ((one, other), (other, one)):
            self._loop.add_reader(source, self._pass_on, source, target, done)
        try:
            await done
        finally:
            for end in (one, other):
                self._loop.remove_reader(end)
                self._loop.remove_writer(end)

    def _pass_on(self, source: socket.socket, target: socket.socket, done: asyncio.Future[None]) -> None:
        """Bytes that have come go on at once; what the target has no room for holds up the source."""
        data, sent = b"", 0
        try:
            data = source.recv(_PIECE)
            sent = target.send(data)
        except BlockingIOError:
            if not data:
                return
        except OSError:
            data = b""
        if not data:
            if not done.done():
                done.set_result(None)
        elif sent < len(data):
            self._loop.remove_reader(source)
            self._loop.add_writer(target, self._send_rest, memoryview(data)[sent:], source, target, done)

    def _send_rest(
        self, data: memoryview, source: socket.socket, target: socket.socket, done: asyncio.Future[None]
    ) -> None:
        self._loop.remove_writer(target)
        try:
            sent = target.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the other direction, or the next read, will find that it is over
        if sent < len(data):
            self._loop.add_writer(target, self._send_rest, data[sent:], source, target, done)
        else:
            self._loop.add_reader(source, self._pass_on, source, target, done)

    async def _is_mine(self, guest: socket.socket) -> None:
        """Let connections of this very process in: its own sockets are those among its files."""
        there, here = (_as_in_proc(end) for end in (guest.getpeername(), guest.getsockname()))
        lines = []
        for name in ("tcp", "tcp6"):  # torch connects through an IPv6 socket, even to 127.0.0.1
            with suppress(FileNotFoundError), open(f"/proc/self/net/{name}") as table:
                lines += [line.split() for line in table]
        nodes = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(there) and line[2].endswith(here)}
        for file in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{file}") in nodes:
                    return
        raise Refused("another process")


def _as_in_proc(address: tuple[str, int]) -> str:
    """``0100007F:1F90``: an address as /proc/net/tcp has it."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


def _listen(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family)
    if family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = address[1:] if isinstance(address, str) else ":".join(map(str, address))
        raise ValueError(
            f"the ranks cannot meet at {where}: {error.strerror}; end what is there, or set another "
            "cluster.master_port (or MASTER_PORT)"
        ) from error
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener


async def _checked(
    inside: socket.socket, address: str | tuple[str, int], check: Callable[[], Awaitable[None]]
) -> socket.socket:
    """Connect, and give the socket back if ``check`` passes."""
    inside.setblocking(False)
    try:
        async with asyncio.timeout(KNOCK_S):
            await asyncio.get_running_loop().sock_connect(inside, address)
            await check()
    except BaseException:
        inside.close()
        raise
    return inside


async def _nothing() -> None:
    """No question is asked inside."""


async def _receive(guest: socket.socket, length: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        Refused: it ended before.
    """
    said = b""
    while len(said) < length:
        more = await asyncio.get_running_loop().sock_recv(guest, length - len(said))
        if not more:
            raise Refused("it hung up")
        said += more
    return said
