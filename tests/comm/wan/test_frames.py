"""An authenticated peer that breaks the protocol: it is cut off, and nothing is harmed."""

import hashlib
import hmac
import os
import socket
import struct
import time
from contextlib import ExitStack, suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comm.wan.test_endpoint import KEY, Pair, noise, until
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.wan.endpoint import WanEndpoint
from weft.comm.wan.library import load
from weft.comm.wan.transport import Path

CHUNK = 4096
DATA, ACK, CREDIT, PING, PONG, BYE = range(1, 7)


class RoguePeer:
    """Speaks the wire format in plain Python, by default as rank 5."""

    def __init__(self, address, *, rank=5, to=1, slot=0, chunk_bytes=CHUNK, job=""):
        self.socket = socket.create_connection(address, timeout=5)
        head = struct.pack("<8s16s", b"weftwan2", hashlib.sha256(job.encode()).digest())
        hello = head + struct.pack("<IIQIIII", rank, to, 99, slot, slot + 1, chunk_bytes, 0) + os.urandom(32)
        self.socket.sendall(hello)
        challenge = self._exactly(80)
        key = KEY.derived("authentication")
        self.socket.sendall(hmac.digest(key, b"connects" + hello + challenge, "sha256"))
        assert self._exactly(32) == hmac.digest(key, b"listens" + hello + challenge, "sha256")

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionError
            data += more
        return data

    def say(self, *args, **fields):
        self.socket.sendall(self.frame(*args, **fields))

    @staticmethod
    def frame(kind, payload=b"", *, lane=0, message=0, total=0, offset=0, length=None, tag=b"a", spoil=0):
        if kind not in (DATA, BYE):
            note = struct.pack("<IHHQQI", 0x74666577, kind, lane, offset, message, 0)
            return note + struct.pack("<I", load().weft_wan_checksum(note, len(note)) ^ spoil) + payload
        length = len(payload) if length is None else length
        total_sum = load().weft_wan_checksum(payload, len(payload)) ^ spoil
        frame = struct.pack("<IHHQQQII48sI", 0x74666577, kind, lane, message, total, offset, length, total_sum, tag, 0)
        frame += struct.pack("<I", load().weft_wan_checksum(frame, len(frame)))
        return frame + payload

    def acknowledged(self):
        """Waits until the other side says that one chunk has arrived whole on this connection."""
        while True:
            _, kind, _, offset = struct.unpack_from("<IHHQ", self._exactly(32))
            if (kind, offset) == (ACK, 1):
                return
            assert kind in (ACK, CREDIT, PING, PONG)

    def settle(self):
        """Read everything that the other side has sent."""
        self.say(PING, offset=7)
        self.hear(PONG, 0, 7)

    def hear(self, *last):
        """The kinds of the frames up to one of this kind, lane and number; without those that ask who is there."""
        kinds, frame = [], None
        while frame != last:
            frame = self._frame()
            kinds.append(frame[0])
        return [kind for kind in kinds if kind not in (PING, PONG)]

    def hear_chunks(self, count):
        """The same up to so many chunks."""
        kinds = []
        while kinds.count(DATA) < count:
            kinds.append(self._frame()[0])
        return [kind for kind in kinds if kind not in (PING, PONG)]

    def _frame(self):
        kind, lane, number = struct.unpack_from("<HHQ", self._exactly(32), 4)
        if kind == DATA:
            self._exactly(struct.unpack_from("<I", self._exactly(64))[0])
        return kind, lane, number

    def cut_off(self):
        """True if the other side closes."""
        try:
            while self.socket.recv(4096):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


@pytest.fixture
def victim(stack):
    settings = {"tls": False, "chunk_bytes": CHUNK, "buffer_bytes": 64 << 10, "deadline_s": 20.0}
    end = WanEndpoint(rank=1, bind="127.0.0.1", key=KEY, **settings)
    stack.callback(end.close, linger_s=0.0)
    end.link(5)
    return end


def test_a_peer_in_plain_python_is_understood(victim):
    """The wire format as its description has it."""
    peer = RoguePeer(victim.address)
    receive = victim.channel(5).recv("a", TensorSpec((5000,), torch.uint8))
    data = bytes(noise(5000))
    peer.say(DATA, data[CHUNK:], total=5000, offset=CHUNK)
    peer.say(DATA, data[:CHUNK], total=5000)
    peer.say(DATA, data[:CHUNK], total=5000)  # twice
    assert bytes(receive.wait()) == data
    until(lambda: victim.counters(5).duplicate_chunks == 1)  # read after the message was whole


@pytest.mark.parametrize("posted", [True, False])
@pytest.mark.parametrize("first", ["old", "new"])
@pytest.mark.parametrize("ends", ["old", "new"])
def test_whichever_copy_of_a_chunk_is_acknowledged_is_here(victim, posted, first, ends):
    """A chunk goes again over another connection; the dying one's copy may come before it or behind it."""
    data, tensor = bytes(noise(CHUNK)), TensorSpec((CHUNK,), torch.uint8)
    channel = victim.channel(5)
    receive = channel.recv("a", tensor) if posted else None
    peers = {"old": RoguePeer(victim.address), "new": RoguePeer(victim.address, slot=1)}
    chunk = RoguePeer.frame(DATA, data, total=CHUNK)
    for name in (first, *(peers.keys() - {first})):
        peers[name].socket.sendall(chunk[:200])
        time.sleep(0.05)  # for it to be read; the transport does not say so
    peers[ends].socket.sendall(chunk[200:])
    peers[ends].acknowledged()
    for peer in peers.values():
        peer.socket.close()
    assert bytes((receive or channel.recv("a", tensor)).wait()) == data


BREACHES = {
    "a length of 4 GiB": {"length": 0xFFFFFFFF, "total": 1 << 32},
    "a chunk above the agreed size": {"payload": b"x" * (CHUNK + 1), "total": CHUNK + 1},
    "a chunk that is too short": {"payload": b"x" * 10, "total": 20},
    "an offset beyond the message": {"payload": b"x" * 10, "total": 10, "offset": CHUNK},
    "an offset at the end": {"total": CHUNK, "offset": CHUNK},
    "an offset between chunks": {"payload": b"x" * 10, "total": 20, "offset": 10},
    "an impossible message": {"payload": b"x" * CHUNK, "total": 1 << 62},
    "a lane that is not open": {"payload": b"x", "total": 1, "lane": 9},
    "a damaged chunk": {"payload": b"x", "total": 1, "spoil": 1},
    "an unknown type": {"kind": 77},
    "a length where none belongs": {"kind": BYE, "length": 5},
    "a damaged note": {"kind": PING, "spoil": 1},
    "an acknowledgement of nothing": {"kind": ACK, "offset": 1},
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES)
def test_a_breach_costs_the_connection(victim, breach):
    victim.channel(5)
    peer = RoguePeer(victim.address)
    peer.say(**{"kind": DATA, **breach})
    assert peer.cut_off()
    assert victim.counters(5).received_bytes == 0


def test_a_message_that_changes_its_size_costs_the_connection(victim):
    victim.channel(5)
    peer = RoguePeer(victim.address)
    peer.say(DATA, b"x" * CHUNK, total=3 * CHUNK)
    peer.say(DATA, b"x" * CHUNK, total=9 * CHUNK, offset=8 * CHUNK)
    assert peer.cut_off()


def test_more_than_was_granted_costs_the_connection(victim):
    victim.channel(5)
    peer = RoguePeer(victim.address)
    for message in range(17):  # the buffer holds sixteen
        peer.say(DATA, b"x" * CHUNK, total=CHUNK, message=message)
    assert peer.cut_off()
    assert victim.counters(5).received_bytes == 64 << 10


@pytest.fixture
def stuck_relay(victim):
    """A relay whose messages from rank 5 are for a rank that does not exist."""
    victim.link(6)
    victim.relay(Path(5, 0), Path(6, 0))
    return victim


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_more_than_was_granted_to_a_relay_costs_the_connection(stuck_relay, whole, first):
    """It would take memory without end: nothing is passed on that the next rank has not asked for."""
    peer = RoguePeer(stuck_relay.address)
    total = CHUNK if whole else 2 * CHUNK
    for message in range(first, first + 40):
        try:
            peer.say(DATA, b"x" * CHUNK, total=total, message=message)
        except ConnectionError:
            break
    assert peer.cut_off()
    assert stuck_relay.counters(5).received_bytes <= 2 * 64 << 10  # its last message may have begun within its credit


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_relay_passes_messages_on_in_order_in_whichever_they_come(stack, victim, order):
    target = stack.enter_context(WanEndpoint(rank=6, bind="127.0.0.1", key=KEY, tls=False, chunk_bytes=CHUNK))
    target.link(1, address=victim.address)
    victim.link(6)
    victim.relay(Path(5, 0), Path(6, 3))
    messages = [bytes(noise(2 * CHUNK + n, n)) for n in range(3)]
    peer = RoguePeer(victim.address)
    for offset in (2 * CHUNK, 0, CHUNK):
        for n in order:
            part = messages[n][offset : offset + CHUNK]
            if part:
                peer.say(DATA, part, total=len(messages[n]), offset=offset, message=n)
    for data in messages:
        received = target.channel(1, lane=3).recv("a", TensorSpec((len(data),), torch.uint8)).wait()
        assert bytes(received) == data


def flood_with_empty_messages(peer):
    """Send more messages than may wait, until the connection is closed."""
    with suppress(ConnectionError):
        for first in range(0, 66_000, 1000):
            peer.socket.sendall(b"".join(peer.frame(DATA, message=first + n) for n in range(1000)))


def test_a_relay_takes_no_messages_without_bytes_without_end(stuck_relay):
    receive = stuck_relay.channel(5, lane=1).recv("b", TensorSpec((1,), torch.uint8))
    peer = RoguePeer(stuck_relay.address)
    flood_with_empty_messages(peer)
    with pytest.raises(ChannelError, match="more than 65536 messages arrived that could not be passed on"):
        receive.wait()


def test_a_relay_passes_on_as_many_messages_as_there_are(stuck_relay):
    """One more for each that the next rank has taken."""
    peer, other = RoguePeer(stuck_relay.address), RoguePeer(stuck_relay.address, rank=6)
    each = 3000
    for first in range(0, 66_000, each):
        peer.socket.sendall(b"".join(peer.frame(DATA, message=first + n) for n in range(each)))
        other.hear_chunks(each)
        other.say(ACK, offset=first + each)


def test_a_chunk_size_out_of_bounds_is_refused(victim):
    for size in (0, 4095, (4 << 20) + 1, 0xFFFFFFFF):
        with pytest.raises(ConnectionError):
            RoguePeer(victim.address, chunk_bytes=size)


def test_a_chunk_size_that_changes_from_one_connection_to_the_next_is_refused(victim):
    receive = victim.channel(5).recv("a", TensorSpec((4 * CHUNK,), torch.uint8))
    peer = RoguePeer(victim.address, chunk_bytes=2 * CHUNK)
    peer.say(DATA, b"x" * 2 * CHUNK, total=4 * CHUNK)
    with pytest.raises(ConnectionError):
        RoguePeer(victim.address, slot=1)
    peer.say(DATA, b"x" * 2 * CHUNK, total=4 * CHUNK, offset=2 * CHUNK)
    assert bytes(receive.wait()) == b"x" * 4 * CHUNK


def test_messages_without_bytes_are_not_taken_without_end(victim):
    receive = victim.channel(5).recv("b", TensorSpec((1,), torch.uint8))
    peer = RoguePeer(victim.address)
    flood_with_empty_messages(peer)
    with pytest.raises(ChannelError, match="more than 65536 messages arrived before their receives were posted"):
        receive.wait()


def test_a_relay_takes_no_message_that_is_larger_than_its_memory(victim):
    """Its size is what a peer says: 1 TiB would be asked for before the second byte has come."""
    victim.link(6)
    victim.relay(Path(5, 0), Path(6, 0))
    receive = victim.channel(5, lane=1).recv("a", TensorSpec((1,), torch.uint8))
    RoguePeer(victim.address).say(DATA, b"x" * CHUNK, total=1 << 40)
    with pytest.raises(
        ChannelError, match="rank 1 - rank 5: a relayed message of 1099511627776 bytes: the limit is 65536"
    ):
        receive.wait()


def test_a_peer_that_does_not_read_answers_is_disconnected(victim):
    victim.channel(5)
    peer = RoguePeer(victim.address)
    peer.socket.settimeout(10)
    with pytest.raises(OSError):  # a reset or a broken pipe, and no memory without end
        for _ in range(2_000_000):
            peer.say(PING)


def test_a_farewell_ends_the_link_in_the_peers_words(victim):
    receive = victim.channel(5).recv("a", TensorSpec((1,), torch.uint8))
    RoguePeer(victim.address).say(BYE, tag=b"lunch")
    with pytest.raises(ChannelError, match="closed by the peer: lunch"):
        receive.wait()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_frames_say_another_link_goes_on(data):
    """Well-sealed frames with any fields, and then noise: the victim serves its other peer."""
    number = st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1), st.integers(0, 20).map(lambda n: n * CHUNK))
    frames = data.draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "kind": st.integers(0, 8),
                    "lane": st.sampled_from([0, 0, 0, 1, 0xFFFF]),
                    "message": number,
                    "total": number,
                    "offset": number,
                    "tag": st.binary(max_size=48),
                    "payload": st.integers(0, CHUNK).map(lambda n: b"x" * n),
                }
            ),
            min_size=1,
            max_size=12,
        )
    )
    with ExitStack() as stack:
        pair = Pair(stack)
        victim = pair.ends[1]
        victim.link(5)
        receives = [victim.channel(5).recv("x", TensorSpec((CHUNK,), torch.uint8)) for _ in range(2)]
        peer = RoguePeer(victim.address)
        try:
            for frame in frames:
                peer.say(**frame)
            peer.socket.sendall(os.urandom(300))
        except ConnectionError:
            pass
        peer.socket.close()
        pair.exchange("a", noise(50_000))
        until(lambda: victim.counters(5).ready == 0)
        del receives
