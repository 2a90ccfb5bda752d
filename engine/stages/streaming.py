"""Frozen weights that stay in host memory, and are on the device one part of a model at a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.backward.offload import HostMemory, host_buffer
from weft.engine.stages.cutting.stage import Stage

ALIGNMENT = 256
"""Each weight begins at a multiple of so many bytes."""


class _Part(NamedTuple):
    """A stage, its weights, where each begins, and the bytes of all, of a file if it is mapped."""

    stage: Stage
    weights: list[Tensor]
    starts: list[int]
    host: Tensor
    mapping: mmap.mmap | None

    def use(self, memory: Tensor) -> None:
        """Let the weights be views of ``memory``, which has the bytes of `host`."""
        for weight, start in zip(self.weights, self.starts, strict=False):
            weight.data = _view(memory, start, weight)


class StreamedStages:
    """The stages of a frozen model, which are used one after the other.

    On a GPU their weights are in pinned host memory. While a stage computes, the weights of the next are copied into
    the second of two buffers. The memory of a CPU is the host's: there an unnamed file has them, whose pages the
    system can drop and read again.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        """Hold no stages.

        Args:
            folder: a folder on a disk, for ranks on a CPU.
        """
        self._device, self._folder = device, folder
        self._parts: list[_Part] = []
        self._lane = HostMemory(device).inward if device.type == "cuda" else None

    def add(self, stage: Stage) -> None:
        """Move the weights of a stage, which is on the device, to the host. Raise ValueError if the disk is full."""
        weights = [parameter for parameter in stage.parameters() if parameter.numel()]
        starts = [0, *accumulate(-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights)]
        mapping = self._map(starts[-1]) if self._lane is None else None
        host = host_buffer(starts[-1], pinned=True) if mapping is None else torch.frombuffer(mapping, dtype=torch.uint8)
        for weight, start in zip(weights, starts, strict=False):
            _view(host, start, weight).copy_(weight.data)
        self._parts.append(part := _Part(stage, weights, starts, host, mapping))
        part.use(host)
        _release(part)

    def __iter__(self) -> Iterator[Stage]:
        """Yield each stage, in order, while its weights are on the device."""
        if self._lane is None:
            for part in self._parts:
                yield part.stage
                _release(part)
            return
        size = max(part.host.nbytes for part in self._parts)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        arrived = self._lane.copy(_pairs(self._parts[0], buffers[0]))
        for index, part in enumerate(self._parts):
            arrived()
            part.use(buffers[index % 2])
            if part is not self._parts[-1]:  # after the stage before, which used this buffer, and beside this one
                arrived = self._lane.copy(_pairs(self._parts[index + 1], buffers[(index + 1) % 2]))
            versions = [weight._version for weight in part.weights]
            try:
                yield part.stage
            finally:
                part.use(part.host)
                arrived()
            if versions != [weight._version for weight in part.weights]:
                name = type(part.stage.hf_model).__name__
                raise ValueError(f"{name} changes its weights in a forward; set inference.scores.enabled=false")

    def _map(self, num_bytes: int) -> mmap.mmap:
        """Return the memory of an unnamed file."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # later a full disk would end the process
                return mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise ValueError(
                f"data.cache_dir={self._folder}: no file for {num_bytes / 1e6:.0f} MB of the teacher "
                f"({error.strerror}); name a folder with more room"
            ) from error


def _view(memory: Tensor, start: int, weight: Tensor) -> Tensor:
    return memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)


def _pairs(part: _Part, buffer: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    return [(part.host, buffer[: part.host.nbytes])]


def _release(part: _Part) -> None:
    """Remove a file's pages from this process. The system keeps what it has memory for."""
    if part.mapping is not None:
        part.mapping.madvise(mmap.MADV_DONTNEED)
