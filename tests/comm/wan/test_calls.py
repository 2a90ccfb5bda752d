"""Costs of a chunk besides its bytes: frames, acknowledgements, and the transport's system calls.

The transport is held until all is there that it is to handle, so that what is counted depends on no
machine and no load.
"""

import ctypes
import mmap
import socket
import struct
import time
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from fcntl import ioctl
from pathlib import Path as File
from termios import TIOCOUTQ

import pytest
import torch

from tests.comm.wan.test_endpoint import KEY, noise, until
from tests.comm.wan.test_frames import ACK, CHUNK, CREDIT, DATA, RoguePeer
from weft.comm.channel import TensorSpec
from weft.comm.native import build
from weft.comm.wan import library, transport
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.transport import Path

WRAPPED = ("recv", "readv", "send", "sendmsg", "epoll_wait", "ppoll")
BUFFER = 64 << 10
CHUNKS = 12  # with their frames less than the 64 kB that a fresh connection takes unread
HEADER, RECORD = 96, 22  # bytes of a chunk's frame, and what TLS adds to a record
TICK_S = 0.05  # without work the loop looks about it so often, and may have a ping to send
LEAST_BATCH_MS, LEAST_BATCH_BYTES = 1.0, 32 << 10  # an iteration of the loop lasts so long, or moves so much


@dataclass(frozen=True)
class Calls:
    """System calls of one endpoint's thread, up to a moment."""

    reads: int
    writes: int
    waits: int
    written_bytes: int
    at_s: float

    def __sub__(self, before):
        return Calls(*(late - early for late, early in zip(astuple(self), astuple(before), strict=True)))

    @property
    def ticks(self):
        """Return the number of each call, without those of intervals in which the loop only polled and pinged."""
        return 2 + int(self.at_s / TICK_S)


class Watched:
    """An endpoint of one connection, whose thread's system calls are counted."""

    def __init__(self, native, rank, **settings):
        usual = {"chunk_bytes": CHUNK, "buffer_bytes": BUFFER, "deadline_s": 20.0, "connections": 1, "tls": False}
        before = _threads()
        self.end = WanEndpoint(rank=rank, bind="127.0.0.1", key=KEY, **{**usual, **settings})
        (self._thread,) = _threads() - before
        self._native = native

    @property
    def calls(self):
        found = (ctypes.c_uint64 * 4)()
        self._native.counted_calls(self._thread, found)
        return Calls(*found, time.monotonic())

    @property
    def page_faults(self):
        """Return the page faults of its thread so far: pages that the kernel had to find, and to fill with zeros."""
        return int(File(f"/proc/self/task/{self._thread}/stat").read_text().rpartition(")")[2].split()[7])

    @contextmanager
    def held(self):
        """It goes on when all has been said."""
        self._native.counted_hold(self._thread)
        until(self._native.counted_stands)
        try:
            yield
        finally:
            self._native.counted_hold(0)


def _threads():
    tasks = list(File("/proc/self/task").iterdir())
    found = set()
    for task in tasks:
        with suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == "weft wan":
                found.add(int(task.name))
    return found


def say_at_once(peer, frames):
    """Returns when the other side's kernel has all of it."""
    peer.socket.sendall(b"".join(frames))
    until(lambda: not struct.unpack("i", ioctl(peer.socket, TIOCOUTQ, bytes(4)))[0])


@pytest.fixture(scope="module")
def native():
    """A build of the transport that counts."""
    here = File(__file__).parent / "counted_transport.cpp"

    def counting(sources, *, kind, flags):
        more = [f"-I{sources[0].parent}", *(f"-Wl,--wrap={name}" for name in WRAPPED)]
        return build([here, *sources], kind=kind, flags=[*flags, *more])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "build", counting)
        made = library.load.__wrapped__()
        patch.setattr(transport, "load", lambda: made)
        yield made


@pytest.fixture
def victim(native, stack):
    watched = Watched(native, 1)
    stack.callback(watched.end.close, linger_s=0.0)
    watched.end.link(5)
    return watched


def frames(data, message=0):
    """A message's chunks."""
    starts = range(0, len(data), CHUNK)
    return [RoguePeer.frame(DATA, data[at : at + CHUNK], total=len(data), offset=at, message=message) for at in starts]


def test_chunks_that_come_together_take_a_read_each_and_one_acknowledgement(victim):
    """A read brings the next chunk's header along; the acknowledgement counts all that are complete."""
    data = bytes(noise(CHUNKS * CHUNK))
    receive = victim.end.channel(5).recv("a", TensorSpec((len(data),), torch.uint8))
    peer = RoguePeer(victim.end.address)
    peer.hear(CREDIT, 0, len(data) + BUFFER)
    peer.settle()
    with victim.held():
        say_at_once(peer, frames(data))
        before = victim.calls
    assert peer.hear(ACK, 0, CHUNKS) == [ACK]
    assert bytes(receive.wait()) == data
    spent = victim.calls - before
    assert CHUNKS <= spent.reads <= CHUNKS + spent.ticks
    assert spent.writes <= 1 + spent.ticks and spent.waits <= 2 * (1 + spent.ticks)  # a ping is a second wait


def test_a_chunk_is_one_write_and_one_acknowledgement_may_be_of_all(victim):
    """Its header goes with it."""
    data = noise(CHUNKS * CHUNK)
    peer = RoguePeer(victim.end.address)
    peer.say(CREDIT, offset=data.nbytes)
    victim.end.channel(5)
    peer.settle()
    with victim.held():
        send = victim.end.channel(5).send("a", data)
        before = victim.calls
    assert peer.hear_chunks(CHUNKS) == [DATA] * CHUNKS
    peer.say(ACK, offset=CHUNKS)
    send.wait()
    spent = victim.calls - before
    assert CHUNKS <= spent.writes <= CHUNKS + spent.ticks and spent.reads <= 1 + spent.ticks


def test_a_relay_reads_and_writes_a_chunk_once_and_says_once_what_it_has_passed_on(victim):
    """Its credit goes up when the next link has a message: also of several, once."""
    victim.end.link(6)
    victim.end.relay(Path(5, 0), Path(6, 0))
    one, other = RoguePeer(victim.end.address), RoguePeer(victim.end.address, rank=6)
    other.say(CREDIT, offset=CHUNKS * CHUNK)
    one.settle()
    other.settle()
    data = bytes(noise(CHUNKS * CHUNK))
    with victim.held():
        pieces = [frames(data[at : at + 4 * CHUNK], message=at // (4 * CHUNK)) for at in range(0, len(data), 4 * CHUNK)]
        say_at_once(one, [frame for piece in pieces for frame in piece])
        before = victim.calls
    assert one.hear(ACK, 0, CHUNKS) == [ACK]
    assert other.hear_chunks(CHUNKS) == [DATA] * CHUNKS
    other.say(ACK, offset=CHUNKS)
    assert one.hear(CREDIT, 0, BUFFER + len(data)) == [CREDIT]
    spent = victim.calls - before
    assert spent.reads <= CHUNKS + 3 + 2 * spent.ticks
    assert spent.writes <= CHUNKS + 2 + 2 * spent.ticks


def test_a_relay_takes_no_fresh_memory_for_each_message(native, stack):
    """The kernel would zero every page of it first."""
    large = {"buffer_bytes": 16 << 20, "chunk_bytes": 128 << 10}
    source, relay, target = ends = [Watched(native, rank, **large) for rank in range(3)]
    for watched in ends:
        stack.callback(watched.end.close, linger_s=0.0)
    relay.end.link(0)
    target.end.link(1)
    source.end.link(1, address=relay.end.address)
    relay.end.link(2, address=target.end.address)
    relay.end.relay(Path(0, 1), Path(2, 1))
    channels = source.end.channel(1, lane=1), target.end.channel(1, lane=1)
    data, together = noise(1 << 20), 4
    before = relay.page_faults
    for _ in range(17):
        receives = [channels[1].recv("a", TensorSpec((data.nbytes,), torch.uint8)) for _ in range(together)]
        sends = [channels[0].send("a", data) for _ in range(together)]
        assert all(torch.equal(receive.wait(), data) for receive in receives)
        for send in sends:
            send.wait()
    in_use_at_once = together * data.nbytes / mmap.PAGESIZE
    assert relay.page_faults - before < 1.5 * in_use_at_once


def test_small_messages_in_a_row_are_served_together(victim):
    """An iteration of the loop lasts so long or moves so much: not one for every packet."""
    count = 200
    victim.end.channel(5)
    peer = RoguePeer(victim.end.address)
    peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settle()
    before = victim.calls
    for message in range(count):
        peer.say(DATA, b"x" * 100, total=100, message=message)
        time.sleep(1e-4)
    acknowledgements = peer.hear(ACK, 0, count)
    spent = victim.calls - before
    most = spent.at_s * 1e3 / LEAST_BATCH_MS + count * (HEADER + 100) / LEAST_BATCH_BYTES + 1
    assert set(acknowledgements) == {ACK} and len(acknowledgements) <= most
    assert spent.writes <= most + spent.ticks and spent.waits <= 2 * (most + spent.ticks)


@pytest.mark.parametrize("address", [None, ("127.0.0.1", 9)], ids=["listens", "connects"])
def test_who_waits_for_a_peer_only_looks_about_now_and_then(victim, address):
    """No core is spent on a rank that comes late."""
    victim.end.link(7, address=address)
    before = victim.calls
    time.sleep(0.4)
    spent = victim.calls - before
    assert spent.waits <= 3 * spent.ticks  # opening a connection is an event or two


def test_tls_reads_many_records_at_once(native, stack):
    """A chunk is two of them, and what the kernel has of all is one read."""
    sender, receiver = (Watched(native, rank, tls=True) for rank in (0, 1))
    for watched in (sender, receiver):
        stack.callback(watched.end.close, linger_s=0.0)
    receiver.end.link(0)
    sender.end.link(1, address=receiver.end.address)
    data = noise(CHUNKS * CHUNK)
    channels = sender.end.channel(1), receiver.end.channel(0)
    receive = channels[1].recv("first", TensorSpec((1,), torch.uint8))
    channels[0].send("first", noise(1)).wait()
    receive.wait()
    receive = channels[1].recv("a", TensorSpec((data.nbytes,), torch.uint8))
    with receiver.held():
        before = receiver.calls, sender.calls
        send = channels[0].send("a", data)
        size = CHUNKS * (HEADER + CHUNK + 2 * RECORD)
        until(lambda: (sender.calls - before[1]).written_bytes >= size)
        writes = (sender.calls - before[1]).writes
    assert torch.equal(receive.wait(), data)
    send.wait()
    spent = receiver.calls - before[0]
    assert spent.reads <= 1 + spent.ticks and spent.writes <= 1 + spent.ticks
    assert writes <= CHUNKS + spent.ticks
