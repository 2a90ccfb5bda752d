"""The channel between two CPU ranks of one host: tensors lie in shared memory, a socket carries notes of them.

Through a loopback socket the kernel copies every byte twice, which on a host with few cores
competes with compute, and a transport's own threads cost a wake-up each. Here the sender
copies a tensor into memory that both sides map, and the receiver reads it in place.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.exchange import gather
from weft.comm.first_contact import Hop, on_host

INLINE_BYTES = 2 << 20
"""Larger tensors are copied by a thread of their own, out of the way of compute; below, its wake-up costs more."""
_NOTE = struct.Struct("=qq")
"""Slot and bytes, followed by the tag: a tensor lies there. A slot's first note brings its file descriptor."""
_NUMBER = struct.Struct("=q")
"""A slot whose tensor is no longer read, on the way back; before all else, the sender's rank."""
_LONGEST_NOTE = 4096


def share(hops: Collection[Hop], *, timeout_s: float) -> tuple[dict[Hop, SharedSender | SharedReceiver], list[Hop]]:
    """Open the channels between CPU ranks of one host; a collective call over the whole world.

    Args:
        hops: directed pairs of ranks, the same on every rank.

    Returns:
        For each hop that touches this rank and stays on its host, its channel; and all hops,
        of any rank, that do not.
    """
    me = dist.get_rank()
    name = f"\0weft-{os.getpid()}-{secrets.token_hex(16)}"  # abstract: nothing is left behind
    channels: dict[Hop, SharedSender | SharedReceiver] = {}
    with _socket(timeout_s) as door:
        door.bind(name)
        door.listen(len(hops) + 1)
        places = gather((host_identity() if on_host() else (me,), name))
        near = sorted(hop for hop in hops if places[hop[0]][0] == places[hop[1]][0])
        for hop in near:
            if hop[0] == me:
                notes = _socket(timeout_s)
                notes.connect(places[hop[1]][1])
                notes.send(_NUMBER.pack(me))
                channels[hop] = SharedSender(notes, hop, timeout_s)
        for _ in range(sum(hop[1] == me for hop in near)):
            notes = _accept(door, timeout_s)
            hop = (*_NUMBER.unpack(notes.recv(_NUMBER.size)), me)
            channels[hop] = SharedReceiver(notes, hop, timeout_s)
    return channels, sorted(set(hops) - set(near))


def _socket(timeout_s: float, file: int | None = None) -> socket.socket:
    """A socket whose calls block for at most ``timeout_s``, unless told not to."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=file)
    made.setblocking(True)  # the kernel times, so that MSG_DONTWAIT is obeyed
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        made.setsockopt(socket.SOL_SOCKET, option, limit)
    return made


def _accept(door: socket.socket, timeout_s: float) -> socket.socket:
    """The next connection of a process of this user."""
    while True:
        come = _socket(timeout_s, door.accept()[0].detach())
        _, user, _ = struct.unpack("3i", come.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            return come
        come.close()


def host_identity() -> tuple[object, ...]:
    """Equal for two processes that share memory and a network.

    Namespaces count: ranks in network namespaces of one machine are apart, as on two machines.
    """
    network = os.stat("/proc/self/ns/net").st_ino
    return (Path("/proc/sys/kernel/random/boot_id").read_text(), os.getuid(), network)


class SharedSender:
    """The sender's end; see `weft.comm.channel.Sender`."""

    def __init__(self, notes: socket.socket, hop: Hop, timeout_s: float) -> None:
        """Take a socket that is connected to the receiver's."""
        self._notes, self._timeout_s = notes, timeout_s
        self._link = f"rank {hop[0]} -> rank {hop[1]}"
        self._slots: list[mmap.mmap] = []
        self._free: list[int] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"weft-{hop[0]}-{hop[1]}")
        self._last: Future[None] | None = None
        self._room = select.poll()
        self._room.register(notes, select.POLLOUT)

    def send(self, tag: str, tensor: Tensor) -> SharedSend:
        """Start sending ``tensor``, which must not be changed until the handle is waited for.

        Raises:
            ChannelError: the receiver has ended.
        """
        if tensor.nbytes <= INLINE_BYTES and (self._last is None or self._last.done()) and self._room.poll(0):
            self._write(tag, tensor)
            return SharedSend(tensor, None)
        self._last = self._writer.submit(self._write, tag, tensor)
        return SharedSend(tensor, self._last)

    def close(self) -> None:
        """Give the socket back; what was sent can still be received."""
        self._writer.shutdown()
        self._notes.close()

    def _write(self, tag: str, tensor: Tensor) -> None:
        """Copy the tensor into a slot, and tell the receiver."""
        slot, files = self._take(tensor.nbytes) if tensor.nbytes else (-1, [])
        if tensor.nbytes:
            place = torch.frombuffer(self._slots[slot], dtype=tensor.dtype, count=tensor.numel())
            place.view(tensor.shape).copy_(tensor.detach())
        try:
            socket.send_fds(self._notes, [_NOTE.pack(slot, tensor.nbytes) + tag.encode()], files)
        except OSError as error:
            raise ChannelError(_trouble(self._link, f"{tag} was not taken", self._timeout_s, error)) from error
        finally:
            for file in files:
                os.close(file)

    def _take(self, num_bytes: int) -> tuple[int, list[int]]:
        """A slot of at least ``num_bytes``; with its file if it is new to the receiver."""
        with suppress(BlockingIOError, ConnectionError):
            while note := self._notes.recv(_NUMBER.size, socket.MSG_DONTWAIT):
                self._free += _NUMBER.unpack(note)
        fits = [slot for slot in self._free if len(self._slots[slot]) >= num_bytes]
        if fits:
            slot = min(fits, key=lambda fit: len(self._slots[fit]))
            self._free.remove(slot)
            return slot, []
        file = os.memfd_create("weft-channel", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        self._slots.append(mmap.mmap(file, num_bytes))
        return len(self._slots) - 1, [file]


@dataclass(frozen=True)
class SharedSend:
    """A tensor that lies in shared memory, or is being written there; see `weft.comm.channel.Transfer`."""

    tensor: Tensor
    written: Future[None] | None

    def wait(self) -> Tensor:
        """Block until the receiver has been told, and return the tensor."""
        if self.written is not None:
            self.written.result()
        return self.tensor

    def ended(self) -> bool:
        """Whether `wait` would return at once."""
        return self.written is None or self.written.done()


class SharedReceiver:
    """The receiver's end; see `weft.comm.channel.Receiver`."""

    def __init__(self, notes: socket.socket, hop: Hop, timeout_s: float) -> None:
        """Take a socket that is connected to the sender's."""
        self._notes, self._timeout_s = notes, timeout_s
        self._link = f"rank {hop[0]} -> rank {hop[1]}"
        self._slots: list[mmap.mmap] = []
        self._expected: deque[SharedReceive] = deque()
        self._unsaid: deque[int] = deque()

    def recv(self, tag: str, spec: TensorSpec) -> SharedReceive:
        """Expect a tensor of ``spec``; it may be here already."""
        handle = SharedReceive(self, tag, spec)
        self._expected.append(handle)
        return handle

    def close(self) -> None:
        """Give the socket back."""
        self._notes.close()

    def read_until(self, handle: SharedReceive) -> None:
        """Take notes as they come until that of ``handle`` is here."""
        while handle.tensor is None:
            try:
                note, files, _, _ = socket.recv_fds(self._notes, _LONGEST_NOTE, 1)
                if not note:
                    raise ConnectionError("the peer has ended")
            except OSError as error:
                what = f"{handle.tag} did not arrive"
                raise ChannelError(_trouble(self._link, what, self._timeout_s, error)) from error
            slot, num_bytes = _NOTE.unpack_from(note)
            for file in files:
                self._slots.append(mmap.mmap(file, 0))
                os.close(file)
            first = self._expected.popleft()
            expected = prod(first.spec.shape) * first.spec.dtype.itemsize
            assert (note[_NOTE.size :].decode(), num_bytes) == (first.tag, expected), (note, first.tag, first.spec)
            first.tensor = self._tensor(slot, first.spec)

    def _tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """A tensor that reads a slot in place; when it is gone, the slot is free again."""
        if slot < 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        view = memoryview(self._slots[slot])
        weakref.finalize(view, self._give_back, slot).atexit = False
        return torch.frombuffer(view, dtype=spec.dtype, count=prod(spec.shape)).view(spec.shape)

    def _give_back(self, slot: int) -> None:
        self._unsaid.append(slot)
        while self._unsaid:
            slot = self._unsaid.popleft()
            try:
                self._notes.send(_NUMBER.pack(slot), socket.MSG_DONTWAIT)
            except OSError:  # the sender has no room for it now, or has ended
                return self._unsaid.append(slot)


class SharedReceive:
    """A receive of a tensor, to be read in place; see `weft.comm.channel.Transfer`."""

    def __init__(self, receiver: SharedReceiver, tag: str, spec: TensorSpec) -> None:
        """Made by `SharedReceiver`, which fills in the tensor."""
        self._receiver, self.tag, self.spec = receiver, tag, spec
        self.tensor: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the tensor is here, and return it.

        Raises:
            ChannelError: the sender has ended, or did not send in time.
        """
        self._receiver.read_until(self)
        assert self.tensor is not None
        return self.tensor

    def ended(self) -> bool:
        """Whether `wait` would return at once, as far as is known."""
        return self.tensor is not None


def _trouble(link: str, what: str, timeout_s: float, error: OSError) -> str:
    late = isinstance(error, BlockingIOError)
    return f"link {link}: {what} " + (
        f"within comm.timeout_s={timeout_s:g}" if late else f"and the peer has ended: {error}"
    )
