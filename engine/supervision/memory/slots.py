"""The memory of a host: a private folder in /dev/shm that outlives ranks, with a slot for each rank's part.

A slot is a rank's part of a memory checkpoint, a mapped file that is valid only once it is committed.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.conf.host.private import private_folder
from weft.engine.checkpoint import manifest_form as form
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.pieces import Piece, StoredPiece, StoredTensor, checksum
from weft.engine.checkpoint.shard_file import (
    DTYPES,
    FILES,
    TYPES,
    ShardEntry,
    StoredFile,
    check_size,
    file_name,
    header_of,
)
from weft.engine.supervision.messages import MEMORY

COMMIT = ".commit"
"""Suffix of the commit file, which marks a slot as complete and describes its contents."""
_WHOLES = "wholes"
"""Entry of the header's metadata: the name, shape and first element of each piece."""


@dataclass(frozen=True)
class Commit:
    """The description of a complete slot.

    Attributes:
        lineage: counts the attempts that took memory checkpoints. ``token`` is unique to each.
        step: optimiser steps done.
        rank, num_ranks: the rank that wrote the slot, and the size of its job.
        num_bytes, header_bytes, header_checksum: see `StoredFile`.
        checksums: checksums of the pieces, in the order of the header.
        meta: JSON values that do not belong to a tensor.
    """

    lineage: int
    token: str
    step: int
    rank: int
    num_ranks: int
    num_bytes: int
    header_bytes: int
    header_checksum: str
    checksums: Sequence[str]
    meta: Mapping[str, Any]

    def text(self) -> bytes:
        """Return the contents of the commit file: a checksum, then JSON."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return checksum(body).encode() + b"\n" + body

    @classmethod
    def parse(cls, text: bytes) -> Commit | None:
        """Parse the output of `text`. Return None if it is incomplete or damaged."""
        digest, _, body = text.partition(b"\n")
        if checksum(body).encode() != digest:
            return None
        with suppress(ValueError, TypeError, RecursionError):
            return cls(**json.loads(body))
        return None

    @property
    def of(self) -> tuple[int, str, int]:
        """Identity of the memory checkpoint that the slot is a part of. The highest one is the newest."""
        return self.lineage, self.token, self.step


class Slot:
    """A rank's slot: a file and its commit in a folder of host memory, which are overwritten repeatedly."""

    def __init__(self, folder: Path, rank: int, *, pinned: bool = False) -> None:
        """Use the paths of ``rank`` in an existing folder, without writing yet.

        Args:
            pinned: register the memory with CUDA, for asynchronous copies.
        """
        self._pinned = pinned
        self.path = folder / file_name(rank)
        self._commit = self.path.with_suffix(COMMIT)
        self._header = b""
        self._places: list[Tensor] = []
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """The whole file, mapped, shape [n]."""

    def open(self, num_bytes: int) -> None:
        """Remove the commit, and allocate ``num_bytes``. Raise OSError if the host does not have enough memory."""
        self._commit.unlink(missing_ok=True)
        if self.bytes.numel() == num_bytes:
            return
        self.close()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)  # writing to a hole without memory for it would raise SIGBUS
        finally:
            os.close(file)
        self.map()

    def map(self) -> None:
        """Map the existing file. Raise OSError if the file is missing."""
        with open(self.path, "r+b") as file:
            self.bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))

    def places(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Remove the commit, and return a view of the mapped memory for each piece.

        Args:
            pieces: pieces in the order of `in_order`, so that each is aligned to its element size.
        """
        wholes = json.dumps([(piece.name, piece.shape, piece.start) for piece in pieces], separators=(",", ":"))
        header = header_of(pieces, **{_WHOLES: wholes})
        self.open(len(header) + sum(piece.num_bytes for piece in pieces))
        if header != self._header:
            self.bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            self._places, at = [], len(header)
            for piece in pieces:
                place = self.bytes[at : at + piece.num_bytes].view(piece.data.dtype)
                self._places.append(place.view(piece.data.shape))
                at += piece.num_bytes
            self._header = header
        return self._places

    def sealed(self, **given: Any) -> Commit:
        """Return the commit for the slot's current contents. ``given`` are the fields that the caller supplies."""
        return Commit(
            num_bytes=self.bytes.numel(),
            header_bytes=len(self._header),
            header_checksum=checksum(self._header),
            checksums=[checksum(place.view(-1).view(torch.uint8).numpy().data) for place in self._places],
            **given,
        )

    def commit(self, text: bytes) -> None:
        """Mark the slot as complete by the text of its `Commit`."""
        temporary = self._commit.with_suffix(".tmp")
        temporary.write_bytes(text)
        os.rename(temporary, self._commit)

    def close(self) -> None:
        """Unmap the file, which remains in the folder."""
        if self._pinned and self.bytes.numel():
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self._header, self._places, self.bytes = b"", [], torch.empty(0, dtype=torch.uint8)


def read_commit(path: Path) -> Commit | None:
    """Return the commit of a slot from its commit file, or None if it is missing or damaged."""
    try:
        commit = Commit.parse(path.read_bytes())
        if commit is not None:
            check_size(path.with_suffix(".safetensors"), _file(commit))
    except (OSError, ValueError):
        return None
    return commit


def entry(commit: Commit, path: Path) -> ShardEntry:
    """Return the manifest entry for the slot of ``commit``, whose file is ``path``.

    Raises:
        ValueError: the file's header is not the one that was committed.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        header = stream.read(commit.header_bytes)
    if checksum(header) != commit.header_checksum:
        raise form.FormError(f"{path}: its header does not match its checksum")
    entries = json.loads(header[8:])
    wholes = json.loads(entries.pop("__metadata__")[_WHOLES])
    tensors = {}
    for (name, shape, start), (key, said), digest in zip(wholes, entries.items(), commit.checksums, strict=True):
        low, high = said["data_offsets"]
        stop = start + (high - low) // TYPES[said["dtype"]].itemsize
        piece = StoredPiece(start, stop, file_name(commit.rank), key, digest)
        tensors[name] = StoredTensor(said["dtype"], tuple(shape), (piece,))
    return ShardEntry(_file(commit), tensors)


def _file(commit: Commit) -> StoredFile:
    return StoredFile(file_name(commit.rank), commit.num_bytes, commit.header_bytes, commit.header_checksum)


def in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort pieces by descending element size, so that each is aligned.

    Raises:
        KeyError: a piece has an element type that checkpoints do not support.
    """
    assert all(piece.data.dtype in DTYPES for piece in pieces)
    return sorted(pieces, key=lambda piece: -piece.data.element_size())


_NAME = re.compile(r"memory-\d{6,}-[ab]")


class HostMemory:
    """The folder that the ranks of one host share."""

    def __init__(self, root: Path) -> None:
        """Open the folder, or create it. Raise ValueError if other users could read or replace the folder."""
        self.root = private_folder(root)

    @classmethod
    def of_environment(cls) -> HostMemory | None:
        """Return the folder that ``WEFT_MEMORY`` names, or None if it is unset."""
        named = os.environ.get(MEMORY)
        return cls(Path(named)) if named else None

    def folder(self, lineage: int, index: int) -> Path:
        """Return the folder of one memory checkpoint's slots. Each lineage alternates between the indices 0 and 1."""
        return self.root / f"memory-{lineage:06d}-{'ab'[index]}"

    def whole(self) -> Iterator[tuple[Path, Commit]]:
        """Yield file and commit of every complete slot. Checksums of pieces are not verified."""
        for folder in self._folders():
            for path in sorted(folder.glob(FILES)):
                commit = read_commit(path.with_suffix(COMMIT))
                if commit is not None and path == folder / f"rank-{commit.rank:03d}.safetensors":
                    yield path, commit

    def forget(self, kept: Collection[Path] = ()) -> None:
        """Remove all folders except those in ``kept``."""
        for folder in self._folders():
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def check_room(self, num_bytes: int) -> None:
        """Check that there is memory for ``num_bytes``, including existing slots.

        Raises:
            CheckpointError: there is too little memory.
        """
        free = shutil.disk_usage(self.root).free
        if num_bytes > free:
            raise CheckpointError(
                f"checkpoint.memory_every: two memory checkpoints of this host's ranks take {num_bytes / 2**30:.2f} "
                f"GiB, and {self.root} has {free / 2**30:.2f} GiB free; enlarge /dev/shm, or set "
                "checkpoint.memory_every=0"
            )

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))
