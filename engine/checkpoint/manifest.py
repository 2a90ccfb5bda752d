"""The manifest, which is written last and lists every file and tensor of a checkpoint with checksums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from weft.engine.checkpoint import durable
from weft.engine.checkpoint import manifest_form as form
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.pieces import StoredTensor, checksum
from weft.engine.checkpoint.shard_file import ShardEntry, StoredFile, check_size, damaged

FORMAT = 1
"""Version of the format, which increases when older readers would misread it."""
MANIFEST = "manifest.json"
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        serial: number of this checkpoint among all that were written in its folder. The newest has the highest.
        name: identifies the same checkpoint on different file systems.
        meta: JSON values that do not belong to a tensor.
        files: every file but the manifest itself.
        here: names of the files that were written in this folder. The others are on other ranks' file systems.
        tensors: every tensor by its name, with its pieces in order.
    """

    step: int
    serial: int
    name: str
    meta: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    here: Sequence[str]
    tensors: Mapping[str, StoredTensor]


def join(
    step: int, serial: int, name: str, meta: Mapping[str, Any], entries: Iterable[ShardEntry], here: Sequence[str]
) -> Manifest:
    """Return one manifest of the files of all ranks.

    Args:
        entries: the files' entries. For the other arguments see `Manifest`.

    Raises:
        CheckpointError: the pieces do not cover all tensors.
    """
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        files[entry.file.name] = entry.file
        for key, tensor in entry.tensors.items():
            known = tensors.get(key)
            if known is not None:
                if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                    raise CheckpointError(f"{key}: ranks hold it with different types or shapes")
                tensor = StoredTensor(known.dtype, known.shape, known.pieces + tensor.pieces)
            tensors[key] = tensor
    for key, tensor in tensors.items():
        pieces = tuple(sorted(tensor.pieces, key=lambda piece: (piece.start, piece.stop, piece.file)))
        tensors[key] = StoredTensor(tensor.dtype, tensor.shape, pieces)
        if missing := tensors[key].missing():
            raise CheckpointError(f"{key}: elements {missing} are missing in what the ranks wrote together")
    return Manifest(step, serial, name, meta, files, here, tensors)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder of a checkpoint. Raise CheckpointError if a value of ``meta`` is not JSON."""
    try:
        body = _canonical({"format": FORMAT, **asdict(manifest)})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"client_state: {error}; give numbers, texts, lists and dictionaries only") from error
    text = f'{{"checksum":"{checksum(body)}",\n"checkpoint":'.encode() + body + b"}\n"
    durable.write(folder / MANIFEST, [text])


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint, and the sizes of its files.

    Raises:
        CheckpointError: the manifest is missing, damaged or of a newer format, or a file is missing or truncated.
    """
    path = folder / MANIFEST
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise ValueError(f"no file of up to {_MOST_BYTES >> 30} GiB")
        outer = json.loads(path.read_bytes())
        body = outer["checkpoint"]
        intact = outer["checksum"] == checksum(_canonical(body))
    except OSError as error:
        raise damaged(path, f"{error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"it is no manifest ({str(error)[:200]})") from error
    if not intact:
        raise damaged(path, "it does not match its checksum")
    try:
        if (version := form.number(body, "format", least=1)) > FORMAT:
            raise CheckpointError(f"{path}: format {version}, this version reads up to {FORMAT}; update weft")
        manifest = _parse(body)
    except form.FormError as error:
        raise damaged(path, f"it matches its checksum and is no manifest of ours: {error}") from error
    for name in manifest.here:
        check_size(folder / name, manifest.files[name])
    return manifest


def _parse(body: dict[str, Any]) -> Manifest:
    files = form.files(body)
    return Manifest(
        step=form.number(body, "step"),
        serial=form.number(body, "serial"),
        name=form.text(body, "name"),
        meta=form.mapping(body, "meta"),
        files=files,
        here=form.here(body, files),
        tensors=form.tensors(body, files),
    )
