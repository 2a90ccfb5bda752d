"""Safe serialization of small values between ranks: JSON plus dataclasses and enums; never pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

_CONTAINERS: Mapping[str, Callable[[list], Any]] = MappingProxyType(
    {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset, "dict": dict}
)
"""Container constructors, from a list of items; a dictionary's items are pairs."""


def encode(value: object) -> bytes:
    """Serialize None, numbers, strings, containers, and dataclasses, named tuples and enums of these as JSON.

    Raises:
        TypeError: the value contains anything else.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes, kinds: tuple[type, ...] = ()) -> Any:
    """Deserialize the result of `encode`.

    Only types in ``kinds`` are instantiated; they validate themselves in ``__post_init__``.

    Args:
        kinds: allowed dataclasses, named tuples and enums; the types of their fields are allowed as well.

    Raises:
        ValueError: invalid data, or a type that is not allowed.
    """
    try:
        return _made(json.loads(data), _allowed(kinds))
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise ValueError(f"cannot decode a value: {type(error).__name__}: {str(error)[:200]}") from error


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return {kind.__name__: value.name}
    if _is_record(kind):
        return {kind.__name__: [_plain(getattr(value, name)) for name in _names(kind)]}
    if kind.__name__ in _CONTAINERS:
        return {kind.__name__: [_plain(item) for item in (value.items() if kind is dict else value)]}
    if isinstance(value, Mapping):
        return {"dict": [_plain(item) for item in value.items()]}
    if isinstance(value, float):  # a numpy scalar
        return float(value)
    raise TypeError(f"{kind.__name__} {value!r}: only plain values can be exchanged between ranks")


def _made(value: Any, kinds: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        raise TypeError("a bare list")
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    kind = kinds.get(name)
    if kind is not None and issubclass(kind, Enum):
        return kind[content]
    if not isinstance(content, list):
        raise TypeError(f"{name}: {type(content).__name__}")
    items = [_made(item, kinds) for item in content]
    if name in _CONTAINERS:
        return _CONTAINERS[name](items)
    return kinds[name](**dict(zip(_names(kinds[name]), items, strict=True)))


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _names(kind: type) -> Sequence[str]:
    return [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]


@cache  # reading annotations takes longer than all else of a small value
def _allowed(kinds: tuple[type, ...]) -> Mapping[str, type]:
    """Return ``kinds`` and, transitively, the types of their fields, by name."""
    found: set[type] = set()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            hints = get_type_hints(kind) if _is_record(kind) else {}
            waiting += [part for hint in hints.values() for part in _parts(hint)]
    return MappingProxyType({kind.__name__: kind for kind in found})


def _parts(hint: Any) -> Iterator[type]:
    """Yield the dataclasses, named tuples and enums in a type annotation."""
    if isinstance(hint, type) and (_is_record(hint) or issubclass(hint, Enum)):
        yield hint
    for part in get_args(hint):
        yield from _parts(part)
