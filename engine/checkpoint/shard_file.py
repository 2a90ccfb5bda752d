"""One rank's checkpoint file: safetensors, written and hashed as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.engine.checkpoint import durable
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.pieces import Piece, StoredPiece, StoredTensor, checksum, raw
from weft.engine.stages.files.folder import TYPE_NAMES

DTYPES = {dtype: name for dtype, name in TYPE_NAMES.items() if not dtype.is_complex}
"""Safetensors' names of the element types that checkpoints have."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}
"""Element types by safetensors' names."""
FILES = "rank-*.safetensors"
"""Pattern of the files' names."""


@dataclass(frozen=True)
class StoredFile:
    """Size and header checksum of a checkpoint file."""

    name: str
    num_bytes: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class ShardEntry:
    """The manifest's entry for a written file."""

    file: StoredFile
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)


def file_name(rank: int) -> str:
    """Return ``rank-003.safetensors``."""
    return FILES.replace("*", f"{rank:03d}")


def write_shard(path: Path, pieces: Sequence[Piece]) -> ShardEntry:
    """Write pieces to a new file, and return its entry. Only one piece at a time is copied from a GPU.

    Raises:
        OSError: the disk is full, or the file exists.
    """
    header = header_of(pieces)
    checksums: list[str] = []
    num_bytes = durable.write(path, _stream(header, pieces, checksums))
    tensors = {
        piece.name: StoredTensor(
            DTYPES[piece.data.dtype],
            piece.shape,
            (StoredPiece(piece.start, piece.start + piece.data.numel(), path.name, _key(piece), digest),),
        )
        for piece, digest in zip(pieces, checksums, strict=True)
    }
    assert len(tensors) == len(pieces), "a rank holds at most one piece of a tensor"
    return ShardEntry(StoredFile(path.name, num_bytes, len(header), checksum(header)), tensors)


def _key(piece: Piece) -> str:
    return piece.name if piece.is_whole else f"{piece.name}@{piece.start}"


def header_of(pieces: Iterable[Piece], **metadata: str) -> bytes:
    """Return the start of a safetensors file: the header after its length, padded so that the data is aligned."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for piece in pieces:
        shape = piece.shape if piece.is_whole else (piece.data.numel(),)
        offsets = (at, at + piece.num_bytes)
        entries[_key(piece)] = {"dtype": DTYPES[piece.data.dtype], "shape": shape, "data_offsets": offsets}
        at += piece.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stream(header: bytes, pieces: Iterable[Piece], checksums: list[str]) -> Iterator[durable.Buffer]:
    yield header
    for piece in pieces:
        data = raw(piece.data.cpu())
        checksums.append(checksum(data))
        yield data


class ShardReader:
    """Reads pieces of one file, each checked against its checksum."""

    def __init__(self, path: Path, file: StoredFile) -> None:
        """Open the file and check its header.

        Raises:
            CheckpointError: it is missing or truncated, or its header is damaged.
        """
        self._path = path
        check_size(path, file)
        with open(path, "rb") as stream:
            if checksum(stream.read(file.header_bytes)) != file.header_checksum:
                raise damaged(path, "its header does not match its checksum")
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise damaged(path, str(error)) from error

    def read(self, piece: StoredPiece, dtype: str) -> Tensor:
        """Read the elements of a piece, shape [n], on the CPU. Raise CheckpointError if the checksum differs."""
        try:
            tensor = self._file.get_tensor(piece.key).view(-1)
        except (SafetensorError, OSError) as error:
            raise damaged(self._path, f"{piece.key}: {error}") from error
        if DTYPES[tensor.dtype] != dtype or tensor.numel() != piece.stop - piece.start:
            raise damaged(self._path, f"{piece.key} has another type or size than the manifest says")
        if checksum(raw(tensor)) != piece.checksum:
            raise damaged(self._path, f"{piece.key} does not match its checksum")
        return tensor


def check_size(path: Path, file: StoredFile) -> None:
    """Check that a file exists with its full size. Raise CheckpointError if the file is missing or has another size."""
    try:
        found = path.stat()
    except OSError as error:
        raise damaged(path, f"{error.strerror}") from error
    if found.st_size != file.num_bytes or not S_ISREG(found.st_mode):
        raise damaged(path, f"it has {found.st_size} bytes instead of {file.num_bytes}, or is no file")


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a damaged file. ``what`` describes the damage."""
    return CheckpointError(
        f"{path}: {what}; the checkpoint is damaged. Resume from another with checkpoint.resume=FOLDER, or delete it"
    )
