"""The channel between two CPU ranks of one host: tensors lie in shared memory, notes go through gloo.

Through a loopback socket the kernel copies every byte twice, which on a host with few cores
competes with compute. Here the receiver offers memory, the sender copies into it once, and the
receiver reads in place.
"""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import TensorSpec
from weft.comm.torch_channel import TorchChannel, TorchHandle

SMALLEST_BYTES = 64 * 1024
"""Messages below this go through the socket whole: the notes would cost as much."""
OFFER = TensorSpec((2,), torch.int64)
"""Process and file descriptor of the receiver's segment."""
WRITTEN = TensorSpec((1,), torch.int64)
"""Bytes that the sender has put there."""


def host_identity() -> tuple[object, ...]:
    """Equal for two processes that can open each other's memory files and share a network.

    Namespaces count: ranks in network namespaces of one machine are apart, as on two machines.
    """
    namespaces = tuple(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    return (Path("/proc/sys/kernel/random/boot_id").read_text(), os.getuid(), *namespaces)


def _map(file: int) -> mmap.mmap:
    return mmap.mmap(file, 0)


def _is_large(num_bytes: int) -> bool:
    return num_bytes >= SMALLEST_BYTES


class Segments:
    """A receiver's shared memory: files without names, which end with their processes."""

    def __init__(self) -> None:
        self._free: list[tuple[int, mmap.mmap]] = []

    def take(self, num_bytes: int) -> tuple[int, mmap.mmap]:
        """File descriptor and memory of at least ``num_bytes``, used before if there is one."""
        for index, (_, memory) in enumerate(self._free):
            if len(memory) >= num_bytes:
                return self._free.pop(index)
        file = os.memfd_create("weft-channel", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        return file, _map(file)

    def tensor(self, segment: tuple[int, mmap.mmap], spec: TensorSpec) -> Tensor:
        """A tensor that reads a segment in place; when it is gone, the segment is free again."""
        view = memoryview(segment[1])
        weakref.finalize(view, self._free.append, segment).atexit = False
        return torch.frombuffer(view, dtype=spec.dtype, count=prod(spec.shape)).view(spec.shape)


class SharedChannel:
    """One direction between this rank and another of its host; see `weft.comm.channel.Channel`."""

    def __init__(self, notes: TorchChannel) -> None:
        """Carry notes and small messages over ``notes``."""
        notes.send_inline()
        self._notes = notes
        self._segments = Segments()
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weft-shared")

    def send(self, tag: str, tensor: Tensor) -> SharedSend:
        """Start sending ``tensor``, which must not be changed until the handle is waited for."""
        return SharedSend(self._writer.submit(self._send, tag, tensor), tensor)

    def recv(self, tag: str, spec: TensorSpec) -> TorchHandle | SharedReceive:
        """Start receiving a tensor of ``spec``."""
        num_bytes = prod(spec.shape) * spec.dtype.itemsize
        if not _is_large(num_bytes):
            return self._notes.recv(tag, spec)
        segment = self._segments.take(num_bytes)
        offer = self._notes.send(tag, torch.tensor([os.getpid(), segment[0]]))
        return SharedReceive(offer, self._notes.recv(tag, WRITTEN), self._segments, segment, spec)

    def _send(self, tag: str, tensor: Tensor) -> TorchHandle:
        """Runs in a thread of its own: it waits for the receiver's offer, and copies."""
        if not _is_large(tensor.nbytes):
            return self._notes.send(tag, tensor)
        pid, file = self._notes.recv(tag, OFFER).wait().tolist()
        if (pid, file) not in self._mapped:
            descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
            self._mapped[pid, file] = _map(descriptor)
            os.close(descriptor)
        place = torch.frombuffer(self._mapped[pid, file], dtype=tensor.dtype, count=tensor.numel())
        place.view(tensor.shape).copy_(tensor.detach())
        return self._notes.send(tag, torch.tensor([tensor.nbytes]))


@dataclass(frozen=True)
class SharedSend:
    """A send that waits for its offer or is being written; see `weft.comm.channel.Handle`."""

    written: Future[TorchHandle]
    tensor: Tensor

    def wait(self) -> Tensor:
        """Block until the receiver has been told, and return the tensor."""
        self.written.result().wait()
        return self.tensor


@dataclass(frozen=True)
class SharedReceive:
    """A receive that has been offered memory; see `weft.comm.channel.Handle`."""

    offer: TorchHandle
    written: TorchHandle
    segments: Segments
    segment: tuple[int, mmap.mmap]
    spec: TensorSpec

    def wait(self) -> Tensor:
        """Block until the tensor is here, and return it."""
        num_bytes = int(self.written.wait())
        assert num_bytes == prod(self.spec.shape) * self.spec.dtype.itemsize, (num_bytes, self.spec)
        self.offer.wait()
        return self.segments.tensor(self.segment, self.spec)


def share(
    channels: dict[tuple[int, int], TorchChannel], device: torch.device
) -> dict[tuple[int, int], TorchChannel | SharedChannel]:
    """Those of ``channels`` that join two CPU ranks of one host, through shared memory; a collective call."""
    hosts: list[tuple[object, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(hosts, host_identity() if device.type == "cpu" else (dist.get_rank(),))
    return {
        hop: SharedChannel(channel) if hosts[hop[0]] == hosts[hop[1]] else channel for hop, channel in channels.items()
    }
