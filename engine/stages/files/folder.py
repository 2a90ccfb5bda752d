"""Check that a model's folder is complete, before weights are read from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from weft.conf.host.documents import parse_json, read_text

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")
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
    for name in INDEXES:
        if (folder / name).is_file():
            try:
                weight_map = parse_json(read_text(folder / name))["weight_map"]
                if not weight_map:
                    raise ValueError("it names no file")
                return [folder / file for file in sorted(set(weight_map.values()))]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"model.path={folder}: {name} cannot be read ({error}); copy or download the folder again"
                ) from error
    for name in SINGLES:
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(f"model.path={folder}: no {SINGLES[0]} in it; give the folder of a saved model, with its weights")


def weight_types(folder: Path) -> set[str]:
    """Return safetensors' names of the floating-point types of a folder's weights.

    Other file formats return an empty set.
    """
    return set(tensor_types(folder).values()) & {"F64", "F32", "F16", "BF16"}


def tensor_types(folder: Path) -> dict[str, str]:
    """Return safetensors' names of the types of a folder's tensors, by name. Other file formats return nothing."""
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
    headers = [read_header(file)[1] for file in files]
    return {name: entry["dtype"] for each in headers for name, entry in each.items() if name != "__metadata__"}


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
