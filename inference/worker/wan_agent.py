"""Prompts' KV caches over Weft's WAN channel: an agent with NIXL's interface, for vLLM's connectors.

An agent that reads or writes another one's memory opens a control connection to it, on which both prove `WEFT_KEY`, and
a link of many TCP connections. A line of JSON on the control connection describes a transfer or a notice. The link
carries memory in batches. If one of the two fails, both are closed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from threading import Event, Lock
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from weft.comm.channel import TensorSpec
from weft.comm.key import WanKey, contexts
from weft.conf.features import entry
from weft.conf.host.threads import Thread, executor

BATCH_BYTES = 1 << 20
WINDOW = 64
"""Batches of a transfer in flight: 64 MiB are 10 Gb/s times 50 ms."""
CONNECTIONS = 16
"""TCP connections of a link."""
DEADLINE_S = 10.0
"""Seconds of silence after which a link has failed, and that a peer has to connect and to authenticate itself."""
THREADS = 16
"""Transfers at a time that an agent begins, and that it serves."""
_LINE_BYTES = 1 << 28
_READER, _OWNER = 0, 1
"""Numbers of a link's ends: who begins transfers, and whose memory is read or written."""

Range = tuple[int, int]
"""Address and number of bytes of a piece of memory."""

log = logging.getLogger(__name__)


class _Peer:
    """The connections to another agent."""

    def __init__(
        self,
        agent: WanAgent,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        number: int,
        job: str,
        **to: Any,
    ) -> None:
        """Create this end of the link. See `WanEndpoint.link` for ``to``."""
        self.reader, self.writer = streams
        self.ready: dict[int, Event] = {}
        """Writes for whose data the peer has asked."""
        self.is_open = True
        self.hearing: asyncio.Task[None] | None = None
        self._loop = agent.loop
        self.endpoint = entry("wan").WanEndpoint(
            rank=number,
            bind=agent.address[0],
            key=agent.key,
            job=job,
            connections=CONNECTIONS,
            deadline_s=DEADLINE_S,
            buffer_bytes=WINDOW * BATCH_BYTES,
        )
        self.endpoint.link(_READER + _OWNER - number, **to)
        self.channel = self.endpoint.channel(_READER + _OWNER - number)

    def say(self, **message: Any) -> None:
        """Send a message. Raise ConnectionError if the connection has ended."""
        if not self.is_open:
            raise ConnectionError("the connection to the other agent has ended")
        self._loop.call_soon_threadsafe(self.writer.write, json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close all connections. Transfers fail."""
        self.is_open = False
        self._loop.call_soon_threadsafe(self.writer.close)
        self.endpoint.close(linger_s=0.0)
        for event in list(self.ready.values()):
            event.set()


@dataclass(eq=False)
class Transfer:
    """Memory that is read or written.

    Attributes:
        pieces: address here, address there and number of bytes of each piece.
        state: as NIXL calls it.
    """

    peer: _Peer
    operation: str
    pieces: list[tuple[int, int, int]]
    notice: bytes
    num_pieces: int
    state: str = "INIT"
    begun_s: float = 0.0
    seconds: float = 0.0


class WanAgent:
    """NIXL's agent, as far as vLLM 0.32 uses it, for host memory. Its methods are NIXL's.

    Attributes:
        address: where it accepts other agents.
    """

    def __init__(self, name: str, config: object = None, *, bind: str, mbps: float = 0.0) -> None:
        """Accept other agents.

        Args:
            name, config: NIXL's, without a meaning here.
            bind: this host's IP address for other agents.
            mbps: megabits per second that it sends at most; 0 for no limit.

        Raises:
            ValueError: there is no key, or the address cannot be bound.
        """
        self.key, self._mbps = WanKey.from_environment(), mbps
        self._accepting, self._connecting = contexts(self.key, "cache certificate")
        entry("wan").WanEndpoint(rank=0, bind=bind, key=self.key).close(linger_s=0.0)  # compiles it, or says why not
        self._memory: list[Range] = []
        self._peers: dict[str, _Peer] = {}
        self._notices: dict[str, list[bytes]] = {}
        self._numbers, self._lock, self._free_s = count(), Lock(), 0.0
        self._begins, self._serves = (executor(f"weft-caches-{kind}", THREADS) for kind in ("begin", "serve"))
        self.loop = asyncio.new_event_loop()
        Thread(self.loop.run_forever, name="weft-caches").start()
        self.address: tuple[str, int] = self._on_loop(self._listen(bind))

    def _on_loop(self, action: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(action, self.loop).result(3 * DEADLINE_S)

    async def _listen(self, bind: str) -> tuple[str, int]:
        server = await asyncio.start_server(
            self._welcome, bind, 0, ssl=self._accepting, ssl_handshake_timeout=DEADLINE_S, limit=_LINE_BYTES
        )
        self._server = server
        return server.sockets[0].getsockname()[:2]

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                job = str(json.loads(await reader.readline())["job"])
            peer = await asyncio.to_thread(_Peer, self, (reader, writer), _OWNER, job)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a peer for caches was refused: %s", error)
            writer.close()
            return
        peer.say(port=peer.endpoint.address[1])
        await self._hear(job, peer)

    async def _connect(self, host: str, port: int) -> str:
        job = secrets.token_hex(16)
        async with asyncio.timeout(DEADLINE_S):
            streams = await asyncio.open_connection(
                host, port, ssl=self._connecting, server_hostname="", limit=_LINE_BYTES
            )
            streams[1].write(json.dumps({"job": job}).encode() + b"\n")
            told = json.loads(await streams[0].readline())
        peer = await asyncio.to_thread(_Peer, self, streams, _READER, job, address=(host, int(told["port"])))
        self._peers[job] = peer
        peer.hearing = asyncio.create_task(self._hear(job, peer))  # a task lives while something refers to it
        return job

    async def _hear(self, name: str, peer: _Peer) -> None:
        try:
            while line := await peer.reader.readline():
                message = json.loads(line)
                if "operation" in message:
                    self._serves.submit(self._serve, name, peer, **message)
                elif "ready" in message:
                    peer.ready[message["ready"]].set()
                else:
                    self._add_notice(name, message["notice"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the connection for caches ends: %r", error)
        finally:
            await asyncio.to_thread(peer.close)

    def _add_notice(self, name: str, text: str) -> None:
        with self._lock:
            self._notices.setdefault(name, []).append(text.encode("latin-1"))

    def _serve(self, name: str, peer: _Peer, *, operation: str, number: int, ranges: list[Range], notice: str) -> None:
        """Send or receive what a peer reads or writes, which has to lie in registered memory."""
        try:
            for begin, size in ranges:
                if not self._holds(begin, size):
                    raise ValueError(f"{size} bytes at {begin:#x} hold no caches")
            if operation == "READ":
                self._send(peer, number, ranges)
            else:
                self._receive(peer, number, ranges, lambda: peer.say(ready=number))
                self._add_notice(name, notice)
        except Exception as error:
            log.warning("a cache was not %s: %s", "sent" if operation == "READ" else "received", error)
            peer.close()

    def _holds(self, begin: int, size: int) -> bool:
        """True if this memory is registered; it may begin in one region and end in the next."""
        while size > 0:
            here = next((first + total - begin for first, total in self._memory if first <= begin < first + total), 0)
            if not here:
                return False
            begin, size = begin + here, max(0, size - here)
        return size == 0

    def _begin(self, transfer: Transfer) -> None:
        peer, number = transfer.peer, next(self._numbers)
        here, there = ([(piece[at], piece[2]) for piece in transfer.pieces] for at in (0, 1))
        notice = transfer.notice.decode("latin-1")

        def ask() -> None:
            peer.say(operation=transfer.operation, number=number, ranges=there, notice=notice)

        try:
            if transfer.operation == "READ":
                self._receive(peer, number, here, ask)
                if notice:
                    peer.say(notice=notice)
            else:
                peer.ready[number] = Event()
                ask()
                peer.ready[number].wait()
                del peer.ready[number]
                self._send(peer, number, here)
        except Exception as error:
            log.warning("a cache was not transferred: %s", error)
            peer.close()
            transfer.state = "ERR"
        else:
            transfer.seconds = monotonic() - transfer.begun_s
            transfer.state = "DONE"

    def _send(self, peer: _Peer, number: int, ranges: Sequence[Range]) -> None:
        sent: deque[Any] = deque()
        for index, batch in enumerate(batches(ranges)):
            if len(sent) == WINDOW:
                sent.popleft().wait()
            joined = torch.empty(sum(size for _, size in batch), dtype=torch.uint8)
            _copy(batch, joined.data_ptr(), outward=True)
            self._pace(joined.nbytes)
            sent.append(peer.channel.send(f"{number}.{index}", joined))
        for handle in sent:
            handle.wait()

    def _receive(self, peer: _Peer, number: int, ranges: Sequence[Range], posted: Callable[[], None]) -> None:
        """Receive memory. Call ``posted`` as soon as the peer may send."""
        left = enumerate(batches(ranges))
        waiting: deque[Any] = deque()

        def post() -> None:
            for index, batch in islice(left, WINDOW - len(waiting)):
                spec = TensorSpec((sum(size for _, size in batch),), torch.uint8)
                waiting.append((batch, peer.channel.recv(f"{number}.{index}", spec)))

        post()
        posted()
        while waiting:
            batch, handle = waiting.popleft()
            _copy(batch, handle.wait().data_ptr(), outward=False)
            post()

    def _pace(self, num_bytes: int) -> None:
        """Wait until the limit lets ``num_bytes`` be sent."""
        if not self._mbps:
            return
        with self._lock:
            begin_s = max(self._free_s, monotonic())
            self._free_s = begin_s + num_bytes * 8e-6 / self._mbps
        sleep(max(0.0, begin_s - monotonic()))

    def get_agent_metadata(self) -> bytes:
        """Return what `add_remote_agent` of another agent needs."""
        return json.dumps(self.address).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Connect to another agent and return its name here.

        Raises:
            OSError: it cannot be reached, or has another key.
        """
        return self._on_loop(self._connect(*json.loads(metadata)))

    def check_remote_metadata(self, name: str) -> bool:
        """True if another agent is connected."""
        return name in self._peers and self._peers[name].is_open

    def remove_remote_agent(self, name: str) -> None:
        """Disconnect another agent."""
        if (peer := self._peers.pop(name, None)) is not None:
            peer.close()

    def get_reg_descs(self, regions: Sequence[Sequence[Any]], kind: str) -> list[Range]:
        """Return the addresses and sizes of regions. Raise ValueError unless they are host memory."""
        if kind != "DRAM":
            raise ValueError(f"{kind}: caches go over the WAN from host memory; set kv_buffer_device to cpu")
        return [(int(region[0]), int(region[1])) for region in regions]

    def register_memory(self, regions: list[Range], backends: object = None) -> None:
        """Let other agents read and write regions."""
        self._memory += regions

    def deregister_memory(self, regions: list[Range]) -> None:
        """Undo `register_memory`."""
        self._memory = [region for region in self._memory if region not in regions]

    def get_xfer_descs(self, blocks: Any, kind: str) -> np.ndarray:
        """Return address and size of each block."""
        return np.asarray(blocks, dtype=np.int64).reshape(len(blocks), -1)[:, :2]

    def prep_xfer_dlist(self, name: str, blocks: np.ndarray) -> tuple[str, np.ndarray]:
        """Return a handle of blocks of this agent or of another."""
        return name, blocks

    def release_dlist_handle(self, handle: object) -> None:
        """Release a handle of `prep_xfer_dlist`."""

    def make_prepped_xfer(
        self,
        operation: str,
        local: tuple[str, np.ndarray],
        local_ids: Any,
        remote: tuple[str, np.ndarray],
        remote_ids: Any,
        notif_msg: bytes = b"",
    ) -> Transfer:
        """Return a transfer between blocks, of which adjacent ones become one piece."""
        here, there = local[1][np.asarray(local_ids)], remote[1][np.asarray(remote_ids)]
        if not np.array_equal(here[:, 1], there[:, 1]):
            raise ValueError("blocks of different sizes")
        follows = [blocks[1:, 0] == blocks[:-1].sum(axis=1) for blocks in (here, there)]
        begins = np.flatnonzero(np.concatenate(([True], ~(follows[0] & follows[1]))))
        sizes = np.add.reduceat(here[:, 1], begins)
        pieces = list(zip(here[begins, 0].tolist(), there[begins, 0].tolist(), sizes.tolist(), strict=True))
        return Transfer(self._peers[remote[0]], operation, pieces, notif_msg, len(here))

    def transfer(self, transfer: Transfer) -> str:
        """Begin a transfer."""
        transfer.state, transfer.begun_s = "PROC", monotonic()
        self._begins.submit(self._begin, transfer)
        return transfer.state

    def check_xfer_state(self, transfer: Transfer) -> str:
        """Return PROC, DONE or ERR."""
        return transfer.state

    def get_xfer_telemetry(self, transfer: Transfer) -> SimpleNamespace:
        """Return what vLLM counts of a transfer; times in microseconds."""
        size = sum(piece[2] for piece in transfer.pieces)
        return SimpleNamespace(
            xferDuration=transfer.seconds * 1e6, postDuration=0.0, totalBytes=size, descCount=transfer.num_pieces
        )

    def release_xfer_handle(self, transfer: Transfer) -> None:
        """Release a transfer. Raise RuntimeError while its memory is in use."""
        if transfer.state == "PROC":
            raise RuntimeError("the transfer is in progress")

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        """Send a notice. Raise ConnectionError if the other agent is not connected."""
        self._peers[name].say(notice=notif_msg.decode("latin-1"))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return notices that have arrived since the last call, by agent."""
        with self._lock:
            found, self._notices = self._notices, {}
        return found


def batches(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Cut ranges into batches of `BATCH_BYTES`, which depend on the sizes only."""
    batch: list[Range] = []
    room = BATCH_BYTES
    for begin, size in ranges:
        at = 0
        while at < size:
            part = min(room, size - at)
            batch.append((begin + at, part))
            at, room = at + part, room - part
            if not room:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def _copy(batch: Sequence[Range], joined: int, *, outward: bool) -> None:
    """Copy a batch to the memory at ``joined``, or from there. Other threads of Python run meanwhile."""
    for begin, size in batch:
        ctypes.memmove(*((joined, begin) if outward else (begin, joined)), size)
        joined += size
