"""Read a checkpoint's tensors by name or by part; every byte is verified when it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.engine.checkpoint.errors import CheckpointError
from weft.engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from weft.engine.checkpoint.pieces import StoredPiece, StoredTensor
from weft.engine.checkpoint.shard_file import TYPES, ShardReader


class Checkpoint:
    """Reads any part of any tensor, whatever layout wrote it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Take a checkpoint whose manifest has been read."""
        self.path = path
        self.manifest = manifest
        self._readers: dict[str, ShardReader] = {}
        self._kept: dict[tuple[str, str], Tensor] = {}

    @property
    def step(self) -> int:
        """Optimiser steps that were done."""
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """What was saved beside the tensors."""
        return self.manifest.meta

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        return self._stored(name).shape

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU.

        Raises:
            CheckpointError: a name is unknown, or a file is damaged.
        """
        return {name: self.read(name).view(self.shape(name)) for name in names}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened tensor, shape [stop - start], on the CPU.

        Raises:
            CheckpointError: the name is unknown, or a file is damaged.
        """
        tensor = self._stored(name)
        stop = tensor.num_elements if stop is None else stop
        assert 0 <= start <= stop <= tensor.num_elements, (name, start, stop)
        parts = [torch.empty(0, dtype=TYPES[tensor.dtype])]
        while start < stop:
            piece = self._nearest(tensor, start)
            elements = self.read_piece(piece, tensor.dtype)
            end = min(stop, piece.stop)
            parts.append(elements[start - piece.start : end - piece.start])
            start = end
        return torch.cat(parts[1:]) if len(parts) > 2 else parts[-1]

    def read_piece(self, piece: StoredPiece, dtype: str) -> Tensor:
        """The elements of a piece, shape [n], on the CPU.

        Args:
            dtype: safetensors' name of its type.

        Raises:
            CheckpointError: a file is damaged.
        """
        kept = self._kept.get((piece.file, piece.key))
        return self._reader(piece.file).read(piece, dtype) if kept is None else kept

    def keep(self, piece: StoredPiece, elements: Tensor) -> None:
        """Know a piece from elsewhere; it is not read any more."""
        self._kept[piece.file, piece.key] = elements

    def pieces(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[StoredPiece, str]]:
        """The pieces that `read` would read, with safetensors' name of their type.

        Raises:
            CheckpointError: the name is unknown.
        """
        tensor = self._stored(name)
        stop = tensor.num_elements if stop is None else stop
        while start < stop:
            piece = self._nearest(tensor, start)
            yield piece, tensor.dtype
            start = piece.stop

    def verify(self) -> None:
        """Read everything that is in this folder.

        Raises:
            CheckpointError: a byte is not as it was written.
        """
        for tensor in self.manifest.tensors.values():
            for piece in tensor.pieces:
                if self.has(piece.file):
                    self._reader(piece.file).read(piece, tensor.dtype)

    def _nearest(self, tensor: StoredTensor, element: int) -> StoredPiece:
        """The piece with an element, in a file of this folder if there is one."""
        holding = [piece for piece in tensor.pieces if piece.start <= element < piece.stop]
        return min(holding, key=lambda piece: (not self.has(piece.file), -piece.stop))

    def has(self, file: str) -> bool:
        """Whether a file can be read here."""
        return file in self.manifest.here or (self.path / file).exists()

    def _stored(self, name: str) -> StoredTensor:
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: it holds no tensor {name}") from None

    def _reader(self, file: str) -> ShardReader:
        if file not in self._readers:
            if not self.has(file):
                raise CheckpointError(
                    f"{self.path}: {file} was written on another file system; resume with every stage where it was, "
                    f"or copy what is missing from the same folder there, without its {MANIFEST}"
                )
            self._readers[file] = ShardReader(self.path / file, self.manifest.files[file])
        return self._readers[file]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in a folder.

    Raises:
        CheckpointError: it is not whole; the message names the file.
    """
    return Checkpoint(path, read_manifest(path))
