"""Check that a model's folder is complete, before weights are read from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor
from transformers.utils import cached_file

from weft.conf.host.documents import parse_json, read_text
from weft.conf.host.terminal import printable

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")
TYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Safetensors' names of element types."""
_MOST_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library accepts."""


def require_whole_folder(folder: Path) -> None:
    """Check from file names, sizes and headers that a folder has a complete model.

    Raises:
        ValueError: a file is missing or truncated. The message names it and the remedy.
    """
    if not folder.is_dir():
        raise ValueError(f"model.path={folder}: not a folder; give the folder of a saved model")
    if not (folder / "config.json").is_file():
        hint = "give the folder of a saved model"
        if (folder / "adapter_config.json").is_file():
            hint = "it holds adapters only; merge them into their base model with peft's merge_and_unload and save that"
        raise ValueError(f"model.path={folder}: no config.json in it; {hint}")
    for file in weight_files(folder):
        if not file.is_file():
            raise ValueError(f"model.path={folder}: {file.name} is missing; copy or download the folder again")
        if file.suffix == ".safetensors":
            _require_whole_file(folder, file)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the folder's weights, which its index or the standard file name determines.

    Raises:
        ValueError: the folder has no weights, or the index cannot be read.
    """
    for single, index in zip(SINGLES, INDEXES, strict=True):  # in transformers' order
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            try:
                return [folder / name for name in _indexed(folder / index)]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"model.path={folder}: {index} cannot be read ({error}); copy or download the folder again"
                ) from error
    raise ValueError(f"model.path={folder}: no {SINGLES[0]} in it; give the folder of a saved model, with its weights")


def _indexed(index: Path) -> list[str]:
    """Return the names of files in an index. They may not lead out of its folder, whose author may be a stranger."""
    names = sorted(set(parse_json(read_text(index))["weight_map"].values()))
    if not names:
        raise ValueError("it names no file")
    if outside := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
        raise ValueError(f"it names {outside[0]!a:.80}, which is not in the folder")
    return names


def weight_types(folder: Path) -> set[str]:
    """Return safetensors' names of the floating-point types of a folder's weights."""
    return set(tensor_types(folder).values()) & {"F64", "F32", "F16", "BF16"}


def tensor_types(folder: Path) -> dict[str, str]:
    """Return safetensors' names of the types of a folder's tensors, by name. No weights are read.

    Raises:
        ValueError: a file is not one of weights.
    """
    types: dict[str, str] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            header = read_header(file)[1].items()
            types |= {name: entry["dtype"] for name, entry in header if name != "__metadata__"}
        else:
            types |= {
                name: TYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) for name, tensor in _pickled(folder, file).items()
            }
    return types


def _pickled(folder: Path, file: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of `torch.save` without their data. Other Python objects are not made."""
    try:
        _require_small_pickles(file)
        found = torch.load(file, map_location="meta", weights_only=True)
        tensors = {name: each for name, each in found.items() if isinstance(name, str) and isinstance(each, Tensor)}
        if not tensors:
            raise ValueError("no tensors by name")
    except Exception as error:  # any: a pickle is a program of its author's
        other = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it has the Python object {other[1]}" if other else f"{error}\n".splitlines()[0] or type(error).__name__
        )
        raise ValueError(
            f"model.path={folder}: {file.name} cannot be read as weights ({printable(reason):.200}); copy or download "
            "it again, or save the model as safetensors"
        ) from error
    return tensors


def _require_small_pickles(file: Path) -> None:
    with file.open("rb") as stream:
        is_archive = stream.read(4) == b"PK\x03\x04"  # since torch 1.6
    if is_archive:
        with ZipFile(file) as archive:
            pickles = [each.file_size for each in archive.infolist() if each.filename.endswith(".pkl")]
        if max(pickles, default=0) > _MOST_HEADER_BYTES:
            raise ValueError(f"a pickle of {max(pickles)} bytes")


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the data of a safetensors file in bytes, and its header.

    Raises:
        ValueError: the header is no JSON, or larger than any that safetensors writes.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        return 8 + length, parse_json(stream.read(length))


def _require_whole_file(folder: Path, file: Path) -> None:
    """Check a safetensors file's size against the offsets in its header."""
    size = file.stat().st_size
    try:
        begin, header = read_header(file)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = begin + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"model.path={folder}: {file.name} is not a safetensors file; copy or download it again"
        ) from error
    if size != whole:
        raise ValueError(f"model.path={folder}: {file.name} has {size} of {whole} bytes; copy or download it again")


def is_local(path: str) -> bool:
    """True if ``model.path`` means a folder rather than a hub name."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or Path(path).expanduser().exists()


def source_of(path: str) -> str:
    """Return the name or folder from which transformers loads ``model.path``; empty for a new model."""
    return str(Path(path).expanduser()) if path and is_local(path) else path


def weights_folder(path: str) -> Path:
    """Return the folder of ``model.path``. For a hub name this is its folder in the local cache."""
    if is_local(path):
        return Path(path).expanduser()
    found = cached_file(path, "config.json")
    assert found is not None
    return Path(found).parent
