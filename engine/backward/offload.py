"""Saved activations in host memory: copied there after a forward, and back before the backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.conf.host.threads import executor


class _Lane(Protocol):
    """Copies one after the other, while the device computes."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        """Start copies of (source, target) after the work that has been launched. Return a function that waits."""


class _ThreadLane:
    """Copies of a CPU, by a thread."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._thread = executor("weft-offload")

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        done: Future[None] = self._thread.submit(self._run, pairs)
        return done.result

    def _run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        began = perf_counter()
        for source, target in pairs:
            target.copy_(source)
        num_bytes = sum(source.nbytes for source, _ in pairs)
        if self._bytes_per_s:
            sleep(max(0.0, began + num_bytes / self._bytes_per_s - perf_counter()))


class _StreamLane:
    """Copies of a GPU, on a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def host_buffer(num_bytes: int, pinned: bool) -> Tensor:
    """Return memory of the host."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


class HostMemory:
    """Lanes to and from host memory, and buffers there, which are pinned if the device is a GPU."""

    def __init__(self, device: torch.device, bytes_per_s: float = 0.0) -> None:
        """Create the lanes.

        Args:
            bytes_per_s: rate of each lane on a CPU, which emulates a slower one. 0 copies as fast as possible.
        """
        on_gpu = device.type == "cuda"
        self.device = device
        self.outward: _Lane = _StreamLane(device) if on_gpu else _ThreadLane(bytes_per_s)
        self.inward: _Lane = _StreamLane(device) if on_gpu else _ThreadLane(bytes_per_s)
        self._pinned = on_gpu
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer."""
        free = self._free[num_bytes]
        return free.pop() if free else host_buffer(num_bytes, self._pinned)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        """Keep buffers whose contents are no longer needed, for later copies."""
        for buffer in buffers:
            self._free[buffer.nbytes].append(buffer)


class _Memory:
    """The memory of saved tensors: a view of all bytes of a storage, or None while only the host has them."""

    def __init__(self, device_bytes: Tensor) -> None:
        self.device_bytes: Tensor | None = device_bytes


class _View(NamedTuple):
    """A saved tensor as a view of memory that may move."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class MovableActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context that owns the tensors that autograd saves, so that their memory can move to the host and back.

    `torch.autograd.graph.save_on_cpu` moves each tensor when it is saved and when it is used. Here the schedule
    decides, and the copies run while other micro-batches are computed. A tensor that is referenced elsewhere is copied
    without harm, but its memory is not freed.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        """Save ``resident`` tensors as they are, because they are alive anyway."""
        self._resident = {tensor.untyped_storage()._cdata for tensor in resident}
        self._memories: dict[int, _Memory] = {}
        self._moved: list[tuple[_Memory, Tensor]] = []
        self._wait: Callable[[], object] = lambda: None
        self._host: HostMemory | None = None
        self.total_bytes = 0
        """Bytes of the saved tensors."""
        self.away_bytes = 0
        """Bytes that only the host has."""
        super().__init__(self._pack, _unpacked)

    def __enter__(self) -> MovableActivations:
        super().__enter__()
        return self

    def holds(self, tensor: Tensor) -> bool:
        """True if the memory of ``tensor`` is that of a saved tensor that can move."""
        return tensor.untyped_storage()._cdata in self._memories

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Leave the memory of these tensors on the device, because others refer to it."""
        for tensor in tensors:
            if tensor is not None:
                self._memories.pop(tensor.untyped_storage()._cdata, None)

    def begin_offload(self, host: HostMemory) -> None:
        """Start to copy everything to the host."""
        self._host = host
        pairs = []
        for memory in self._memories.values():
            assert memory.device_bytes is not None
            buffer = host.take(memory.device_bytes.nbytes)
            pairs.append((memory.device_bytes, buffer))
            self._moved.append((memory, buffer))
        self._memories.clear()
        self._wait = host.outward.copy(pairs)

    def end_offload(self) -> None:
        """Wait for the copies, and free the device's memory."""
        self._wait()
        for memory, buffer in self._moved:
            memory.device_bytes = None
            self.away_bytes += buffer.nbytes

    def begin_reload(self) -> None:
        """Allocate memory of the device, and start to copy everything back."""
        host, pairs = self._host, []
        assert host is not None
        for memory, buffer in self._moved:
            memory.device_bytes = torch.empty(buffer.nbytes, dtype=torch.uint8, device=host.device)
            pairs.append((buffer, memory.device_bytes))
        self.away_bytes = 0
        self._wait = host.inward.copy(pairs)

    def begin_backward(self) -> None:
        """Wait for the copies, and leave the tensors to the graph, which frees them during the backward."""
        self._wait()
        if self._host is not None:
            self._host.give_back(buffer for _, buffer in self._moved)
        self._moved.clear()
        self._memories.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if storage._cdata in self._resident or type(tensor) is not Tensor:
            return tensor
        if storage._cdata not in self._memories:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),))
            self._memories[storage._cdata] = _Memory(whole)
            self.total_bytes += storage.nbytes()
        memory = self._memories[storage._cdata]
        return _View(memory, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpacked(saved: Any) -> Tensor:
    if not isinstance(saved, _View):
        return saved
    assert saved.memory.device_bytes is not None, "a backward before its activations were back"
    storage = saved.memory.device_bytes.untyped_storage()
    empty = torch.empty(0, dtype=saved.dtype, device=saved.memory.device_bytes.device)
    return empty.set_(storage, saved.offset, saved.size, saved.stride)
