"""Validate a manifest's form, because a checksum does not protect against someone who can write both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from typing import Any, TypeVar

from weft.engine.checkpoint.pieces import StoredPiece, StoredTensor
from weft.engine.checkpoint.shard_file import TYPES, StoredFile

T = TypeVar("T")
MOST_ELEMENTS, MOST_AXES = 1 << 56, 32
"""Largest numbers of elements and axes of a tensor, which are torch's own limits."""
_MOST_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library accepts."""
_FILE = re.compile(r"rank-\d{3,9}\.safetensors")


class FormError(ValueError):
    """The manifest has a value that Weft never writes."""


def number(body: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    """Return the integer ``body[name]``, of at least ``least``.

    Raises:
        FormError: the value has another form. The other functions raise it, too.
    """
    value = _field(body, name, int)
    if value < least:
        raise FormError(f"{name}={value}: the least is {least}")
    return value


def text(body: Mapping[str, Any], name: str) -> str:
    """Return the string ``body[name]``."""
    return _field(body, name, str)


def numbers(body: Mapping[str, Any], name: str) -> list[float]:
    """Return the list of finite numbers ``body[name]``."""
    values = _field(body, name, list)
    if not all(type(value) in (int, float) and isfinite(value) for value in values):
        raise FormError(f"{name}={_short(values)}: not all of them are finite numbers")
    return [float(value) for value in values]


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the dictionary ``body[name]``."""
    return _field(body, name, dict)


def files(body: Mapping[str, Any]) -> dict[str, StoredFile]:
    """Return the files by name. Names must have Weft's form, so that no path leaves the checkpoint's folder."""
    return {name: _within(f"files[{name!r}]", _file, name, file) for name, file in mapping(body, "files").items()}


def here(body: Mapping[str, Any], known: Mapping[str, StoredFile]) -> tuple[str, ...]:
    """Return the names of files in this folder, which must be among the ``known`` ones."""
    names = _field(body, "here", list)
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise FormError(f"here: {_short(name)} is none of its files")
    return tuple(names)


def tensors(body: Mapping[str, Any], known: Mapping[str, StoredFile]) -> dict[str, StoredTensor]:
    """Return the tensors by name. Pieces must be in order, cover each tensor, and be in listed files."""
    return {
        name: _within(f"tensors[{name!r}]", _tensor, tensor, known) for name, tensor in mapping(body, "tensors").items()
    }


def _file(name: str, body: Any) -> StoredFile:
    if not _FILE.fullmatch(name) or text(body, "name") != name:
        raise FormError(f"{_short(name)} is no file's name")
    size, header = number(body, "num_bytes"), number(body, "header_bytes")
    if header > size:
        raise FormError(f"header_bytes={header}: more than num_bytes={size}")
    if header > _MOST_HEADER_BYTES:
        raise FormError(f"header_bytes={header}: more than {_MOST_HEADER_BYTES}")
    return StoredFile(name, size, header, text(body, "header_checksum"))


def _tensor(body: Any, known: Mapping[str, StoredFile]) -> StoredTensor:
    shape = _field(body, "shape", list)
    numbers = all(type(size) is int and size >= 0 for size in shape)
    if not numbers or prod(size or 1 for size in shape) > MOST_ELEMENTS or len(shape) > MOST_AXES:
        raise FormError(f"shape={_short(shape)}")
    if text(body, "dtype") not in TYPES:
        raise FormError(f"dtype={_short(body['dtype'])}: none of {', '.join(TYPES)}")
    pieces = tuple(_piece(piece, known) for piece in _field(body, "pieces", list))
    tensor = StoredTensor(body["dtype"], tuple(shape), pieces)
    _check_cover(pieces, prod(shape))
    if missing := tensor.missing():
        raise FormError(f"no piece holds elements {missing}")
    return tensor


def _piece(body: Any, known: Mapping[str, StoredFile]) -> StoredPiece:
    start = number(body, "start")
    piece = StoredPiece(
        start, number(body, "stop", least=start), text(body, "file"), text(body, "key"), text(body, "checksum")
    )
    if piece.file not in known:
        raise FormError(f"file={_short(piece.file)} is none of its files")
    return piece


def _check_cover(pieces: Sequence[StoredPiece], elements: int) -> None:
    starts = [piece.start for piece in pieces]
    if starts != sorted(starts) or any(piece.stop > elements for piece in pieces):
        raise FormError(f"pieces are out of order, or go beyond its {elements} elements")


def _within(where: str, read: Callable[..., T], *args: Any) -> T:
    try:
        return read(*args)
    except FormError as error:
        raise FormError(f"{where[:200]}: {error}") from None


def _field(body: Any, name: str, kind: type[T]) -> T:
    value = body.get(name) if isinstance(body, dict) else None
    if type(value) is not kind:  # not isinstance, because True must not count as a number
        raise FormError(f"{name}={_short(value)}: expected {kind.__name__}")
    return value


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 100 else said[:100] + "..."
