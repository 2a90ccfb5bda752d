"""Read a checkpoint's tensors by name or by part. Every byte is verified when it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from weft.engine.checkpoint.pieces import StoredPiece, StoredTensor, cut_tensors, overlap, stored_name
from weft.engine.checkpoint.shard_file import TYPES, ShardReader, damaged
from weft.engine.parallel.cut import Cut


class Checkpoint:
    """Reads any part of any tensor of a checkpoint, which any layout may have written."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        try:
            self._cuts = cut_tensors({name: tensor.shape for name, tensor in manifest.tensors.items()})
        except ValueError as error:
            raise damaged(path / MANIFEST, str(error)) from None
        self._readers: dict[str, ShardReader] = {}
        self._kept: dict[tuple[str, str], Tensor] = {}

    @property
    def step(self) -> int:
        """Number of optimiser steps done."""
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """Return the metadata saved with the tensors."""
        return self.manifest.meta

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors, stored whole or in parts."""
        parts = {stored_name(name, cut) for name, cuts in self._cuts.items() for cut in cuts}
        return frozenset((self.manifest.tensors.keys() - parts) | self._cuts.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raise CheckpointError if the name is unknown."""
        return self._cuts[name][0].shape if name in self._cuts else self._stored(name).shape

    def is_whole(self, name: str) -> bool:
        """True if a tensor is stored under its own name, in pieces or not, and False if ranks have stored parts."""
        return name not in self._cuts

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors on the CPU. Raise CheckpointError if a name is unknown, or a file is damaged."""
        return {name: self.read(name).view(self.shape(name)) for name in names}

    def read(self, name: str, start: int = 0, stop: int | None = None, cut: Cut | None = None) -> Tensor:
        """Return elements ``start`` to ``stop`` of a flattened tensor, shape [stop - start], on the CPU.

        Args:
            cut: the part of the tensor that is flattened. It may differ from the stored parts. None means the whole
                tensor.

        Raises:
            CheckpointError: the name is unknown, or a file is damaged.
        """
        source = self._source(name, cut)
        if source is not None:
            return self._read(source, start, stop)
        parts = self._needed(name, cut)
        first = self._stored(stored_name(name, parts[0]))
        whole = torch.empty(self.shape(name), dtype=TYPES[first.dtype])
        for part in parts:
            stored = stored_name(name, part)
            elements = self._read(stored, 0, None).view(self._stored(stored).shape)
            whole.copy_(elements) if part is None else part.put(elements, whole)
        taken = whole if cut is None else cut.take(whole)
        return taken.reshape(-1)[start:stop]

    def _source(self, name: str, cut: Cut | None) -> str | None:
        """Return the name under which exactly this part of a tensor is stored, or None if it is not stored so."""
        if name not in self._cuts:
            return name if cut is None else None
        same = [mine for mine in self._cuts[name] if cut is not None and stored_name("", mine) == stored_name("", cut)]
        return stored_name(name, cut) if same else None

    def _needed(self, name: str, cut: Cut | None) -> list[Cut | None]:
        """Return the stored parts that overlap a part of a tensor. In both, None means the whole tensor."""
        stored = self._cuts.get(name)
        return [None] if stored is None else [mine for mine in stored if cut is None or overlap(mine, cut)]

    def _read(self, stored: str, start: int, stop: int | None) -> Tensor:
        tensor = self._stored(stored)
        stop = tensor.num_elements if stop is None else stop
        assert 0 <= start <= stop <= tensor.num_elements, (stored, start, stop)
        parts = [torch.empty(0, dtype=TYPES[tensor.dtype])]
        while start < stop:
            piece = self._nearest(tensor, start)
            elements = self.read_piece(piece, tensor.dtype)
            end = min(stop, piece.stop)
            parts.append(elements[start - piece.start : end - piece.start])
            start = end
        return torch.cat(parts[1:]) if len(parts) > 2 else parts[-1]

    def read_piece(self, piece: StoredPiece, dtype: str) -> Tensor:
        """Read the elements of a piece, shape [n], on the CPU.

        Args:
            dtype: safetensors' name of its type.

        Raises:
            CheckpointError: a file is damaged.
        """
        kept = self._kept.get((piece.file, piece.key))
        return self._reader(piece.file).read(piece, dtype) if kept is None else kept

    def keep(self, piece: StoredPiece, elements: Tensor) -> None:
        """Store the elements of a piece that another rank has read, so that it is not read here."""
        self._kept[piece.file, piece.key] = elements

    def pieces(
        self, name: str, start: int = 0, stop: int | None = None, cut: Cut | None = None
    ) -> Iterator[tuple[StoredPiece, str]]:
        """Yield the pieces that `read` would read, with safetensors' name of their type.

        Raises:
            CheckpointError: the name is unknown.
        """
        source = self._source(name, cut)
        if source is not None:
            yield from self._pieces(source, start, stop)
            return
        for part in self._needed(name, cut):
            yield from self._pieces(stored_name(name, part), 0, None)

    def _pieces(self, name: str, start: int, stop: int | None) -> Iterator[tuple[StoredPiece, str]]:
        tensor = self._stored(name)
        stop = tensor.num_elements if stop is None else stop
        while start < stop:
            piece = self._nearest(tensor, start)
            yield piece, tensor.dtype
            start = piece.stop

    def _nearest(self, tensor: StoredTensor, element: int) -> StoredPiece:
        """Return a piece with an element, preferably in a file of this folder."""
        holding = [piece for piece in tensor.pieces if piece.start <= element < piece.stop]
        return min(holding, key=lambda piece: (not self.has(piece.file), -piece.stop))

    def has(self, file: str) -> bool:
        """True if a file is in this folder."""
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
        CheckpointError: it is not complete. The message names the file.
    """
    return Checkpoint(path, read_manifest(path))
