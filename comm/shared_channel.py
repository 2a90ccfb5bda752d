"""The shared-memory channel between two CPU ranks of one host; a Unix socket carries its control messages.

Over a loopback socket the kernel copies every byte twice, which competes with compute on hosts
with few cores, and the transport's own threads cost context switches. Here the sender copies a
tensor once, into memory that both sides map, and the receiver reads it in place.
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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.backends import on_host
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.exchange import gather
from weft.comm.links import Hop
from weft.conf.host.processes import host_identity, peer_process
from weft.conf.host.threads import executor

INLINE_BYTES = 2 << 20
"""Larger tensors are copied by a separate thread; for smaller ones the context switch costs more than the copy."""
_HEADER = struct.Struct("=qq")
"""Announces a tensor: slot and bytes, followed by the tag. A slot's first header carries its file descriptor."""
_NUMBER = struct.Struct("=q")
"""A number: from the receiver, a slot to reuse; in the sender's first message, its rank."""
_MAX_HEADER_BYTES = 4096


def share(hops: Collection[Hop], *, timeout_s: float) -> tuple[dict[Hop, SharedSender | SharedReceiver], list[Hop]]:
    """Open the channels between CPU ranks of one host. A collective call over the whole world.

    Args:
        hops: directed pairs of ranks, the same on every rank.

    Returns:
        The channel of each hop of this rank that stays on its host; and the remaining hops of
        all ranks, which leave their host.
    """
    me = dist.get_rank()
    name = f"\0weft-{os.getpid()}-{secrets.token_hex(16)}"  # in the abstract namespace, which leaves no file
    channels: dict[Hop, SharedSender | SharedReceiver] = {}
    with _socket(timeout_s) as listener:
        listener.bind(name)
        listener.listen(len(hops) + 1)
        addresses = gather((host_identity() if on_host() else (me,), name))
        near = sorted(hop for hop in hops if addresses[hop[0]][0] == addresses[hop[1]][0])
        for hop in near:
            if hop[0] == me:
                control = _socket(timeout_s)
                control.connect(addresses[hop[1]][1])
                control.send(_NUMBER.pack(me))
                channels[hop] = SharedSender(control, hop, timeout_s)
        for _ in range(sum(hop[1] == me for hop in near)):
            control = _accept(listener, timeout_s)
            hop = (*_NUMBER.unpack(control.recv(_NUMBER.size)), me)
            channels[hop] = SharedReceiver(control, hop, timeout_s)
    return channels, sorted(set(hops) - set(near))


def _socket(timeout_s: float, file: int | None = None) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=file)
    made.setblocking(True)  # with kernel time-outs, which leave MSG_DONTWAIT usable
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        made.setsockopt(socket.SOL_SOCKET, option, limit)
    return made


def _accept(listener: socket.socket, timeout_s: float) -> socket.socket:
    """Accept the next connection from a process of this user."""
    while True:
        accepted = _socket(timeout_s, listener.accept()[0].detach())
        _, user = peer_process(accepted)
        if user == os.getuid():
            return accepted
        accepted.close()


class SharedSender:
    """The sending end. See `weft.comm.channel.Sender`."""

    def __init__(self, control: socket.socket, hop: Hop, timeout_s: float) -> None:
        self._control, self._timeout_s = control, timeout_s
        self._link = f"rank {hop[0]} -> rank {hop[1]}"
        self._slots: list[mmap.mmap] = []
        self._free: list[int] = []
        self._writer = executor(f"weft-{hop[0]}-{hop[1]}")
        self._last: Future[None] | None = None
        self._room = select.poll()
        self._room.register(control, select.POLLOUT)

    def send(self, tag: str, tensor: Tensor) -> SharedSend:
        """Start sending ``tensor``, which must not be modified before the handle's `wait` returns.

        Raises:
            ChannelError: the receiver has exited.
        """
        if tensor.nbytes <= INLINE_BYTES and (self._last is None or self._last.done()) and self._room.poll(0):
            self._write(tag, tensor)
            return SharedSend(tensor, None)
        self._last = self._writer.submit(self._write, tag, tensor)
        return SharedSend(tensor, self._last)

    def interrupt(self) -> None:
        """Make the waits of both ends fail. Callable from any thread."""
        _interrupt(self._control)

    def close(self) -> None:
        """Close the socket; tensors that were sent can still be received."""
        self._writer.shutdown()
        self._control.close()

    def _write(self, tag: str, tensor: Tensor) -> None:
        slot, files = self._take(tensor.nbytes) if tensor.nbytes else (-1, [])
        if tensor.nbytes:
            memory = torch.frombuffer(self._slots[slot], dtype=tensor.dtype, count=tensor.numel())
            memory.view(tensor.shape).copy_(tensor.detach())
        try:
            socket.send_fds(self._control, [_HEADER.pack(slot, tensor.nbytes) + tag.encode()], files)
        except OSError as error:
            raise ChannelError(_error_text(self._link, f"{tag} could not be sent", self._timeout_s, error)) from error
        finally:
            for file in files:
                os.close(file)

    def _take(self, num_bytes: int) -> tuple[int, list[int]]:
        """Return a slot of at least ``num_bytes``, and its file descriptor in a list if the slot is new."""
        with suppress(BlockingIOError, ConnectionError):
            while message := self._control.recv(_NUMBER.size, socket.MSG_DONTWAIT):
                self._free += _NUMBER.unpack(message)
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
    """A tensor that is, or will be, in shared memory. See `weft.comm.channel.SendHandle`."""

    tensor: Tensor
    written: Future[None] | None

    def wait(self) -> Tensor:
        """Block until the tensor is announced to the receiver, and return it."""
        if self.written is not None:
            self.written.result()
        return self.tensor

    def ended(self) -> bool:
        """True if `wait` would return immediately."""
        return self.written is None or self.written.done()


class SharedReceiver:
    """The receiving end. See `weft.comm.channel.Receiver`."""

    def __init__(self, control: socket.socket, hop: Hop, timeout_s: float) -> None:
        self._control, self._timeout_s = control, timeout_s
        self._link = f"rank {hop[0]} -> rank {hop[1]}"
        self._slots: list[mmap.mmap] = []
        self._expected: deque[SharedReceive] = deque()
        self._unreleased: deque[int] = deque()

    def recv(self, tag: str, spec: TensorSpec) -> SharedReceive:
        """Post a receive of a tensor of ``spec``."""
        handle = SharedReceive(self, tag, spec)
        self._expected.append(handle)
        return handle

    def interrupt(self) -> None:
        """Make the waits of both ends fail. Callable from any thread."""
        _interrupt(self._control)

    def close(self) -> None:
        """Close the socket."""
        self._control.close()

    def read_until(self, handle: SharedReceive) -> None:
        """Read announcements until the one for ``handle`` has arrived."""
        while handle.tensor is None:
            try:
                message, files, _, _ = socket.recv_fds(self._control, _MAX_HEADER_BYTES, 1)
                if not message:
                    raise ConnectionError("its socket is closed")
            except OSError as error:
                what = f"{handle.tag} did not arrive"
                raise ChannelError(_error_text(self._link, what, self._timeout_s, error)) from error
            slot, num_bytes = _HEADER.unpack_from(message)
            for file in files:
                self._slots.append(mmap.mmap(file, 0))
                os.close(file)
            first = self._expected.popleft()
            expected = prod(first.spec.shape) * first.spec.dtype.itemsize
            assert (message[_HEADER.size :].decode(), num_bytes) == (first.tag, expected), (
                message,
                first.tag,
                first.spec,
            )
            first.tensor = self._tensor(slot, first.spec)

    def _tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        """Return a tensor over a slot's memory. The slot is released when the tensor is garbage collected."""
        if slot < 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        view = memoryview(self._slots[slot])
        weakref.finalize(view, self._release, slot).atexit = False
        return torch.frombuffer(view, dtype=spec.dtype, count=prod(spec.shape)).view(spec.shape)

    def _release(self, slot: int) -> None:
        self._unreleased.append(slot)
        while self._unreleased:
            slot = self._unreleased.popleft()
            try:
                self._control.send(_NUMBER.pack(slot), socket.MSG_DONTWAIT)
            except OSError:  # the socket buffer is full, or the sender has exited
                return self._unreleased.append(slot)


class SharedReceive:
    """A receive whose tensor is read in place. See `weft.comm.channel.SendHandle`."""

    def __init__(self, receiver: SharedReceiver, tag: str, spec: TensorSpec) -> None:
        self._receiver, self.tag, self.spec = receiver, tag, spec
        self.tensor: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the tensor has arrived, and return it.

        Raises:
            ChannelError: the sender has exited, or did not send in time.
        """
        self._receiver.read_until(self)
        assert self.tensor is not None
        return self.tensor

    def ended(self) -> bool:
        """True if `wait` is known to return immediately."""
        return self.tensor is not None


def _interrupt(control: socket.socket) -> None:
    with suppress(OSError):  # this end or the other is closed
        control.shutdown(socket.SHUT_RDWR)


def _error_text(link: str, what: str, timeout_s: float, error: OSError) -> str:
    timed_out = isinstance(error, BlockingIOError)
    return f"link {link}: {what} " + (
        f"within comm.timeout_s={timeout_s:g}" if timed_out else f"and the peer has exited: {error}"
    )
