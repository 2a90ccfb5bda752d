"""Recipe files, which are untrusted: their size is limited, and they cannot read secrets of the user who runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.conf.fields import text_places
from weft.conf.host.documents import read_yaml

ENVIRONMENT = frozenset(
    (
        *("HOME", "HOSTNAME", "LOGNAME", "PWD", "SCRATCH", "TMPDIR", "USER", "WORK", "XDG_CACHE_HOME", "HF_HOME"),
        *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_TMPDIR"),
    )
)
"""Environment variables that a recipe file may read. Others may not, because settings appear in names, logs and W&B."""
MOST_BYTES = 2**20
MOST_CHARACTERS = 1_000_000
"""Largest length of all values together, with their references resolved."""
_RESOLVERS = ("oc.env", "now")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_ELSEWHERE = 100
"""Assumed length of a value that a reference takes from elsewhere."""


def read_recipe(path: str) -> dict[str, Any]:
    """Read the settings in a recipe file.

    Raises:
        ValueError: it cannot be read, is not YAML with fields, reads a variable that may be secret, or its resolved
            references are too long.
    """
    try:
        tree = read_yaml(Path(path).expanduser(), most_bytes=MOST_BYTES, texts=text_places())
        if not isinstance(tree, dict):
            raise ValueError("holds no fields; write for example `train: {steps: 10}`")
        if any(part in str(tree.get("defaults")) for part in ("..", "${", "_file")):  # files there would not be checked
            raise ValueError("defaults: name recipes and groups of Weft, without paths and references")
        _References(tree).check()
    except ValueError as error:
        raise ValueError(f"recipe={path}: {error}") from error
    return tree


class _References:
    """The references, ``${...}``, in a recipe's values."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._values = dict(_nodes(tree, ""))
        self._sizes: dict[str, int] = {}

    def check(self) -> None:
        """Check each reference, and the length of all values with references resolved."""
        for place, value in self._values.items():
            if isinstance(value, str) and "${" in value:
                self._check_text(place, value)
        if self._size("") > MOST_CHARACTERS:
            raise ValueError(f"its references stand for more than {MOST_CHARACTERS:,} characters; write values out")

    def _check_text(self, place: str, text: str) -> None:
        if "${" in _REFERENCE.sub("", text):  # OmegaConf reads braces in arguments, even those in quotes
            raise ValueError(f"{place}: a reference with braces inside is not supported in a file; write the value out")
        for inside in _REFERENCE.findall(text):
            resolver, colon, arguments = inside.partition(":")
            if not colon:
                continue
            name = arguments.split(",")[0].strip(" \t\"'")
            if (resolver := resolver.strip()) not in _RESOLVERS:
                raise ValueError(f"{place}: ${{{resolver}:...}} is not supported in a file; write the value out")
            if resolver == "oc.env" and name not in ENVIRONMENT:
                raise ValueError(
                    f"{place}: a file may not read the variable {name}, because settings appear in names, logs and W&B "
                    f"(allowed: {', '.join(sorted(ENVIRONMENT))}); give the value on the command line, {place}=..."
                )

    def _size(self, place: str) -> int:
        """Return the length of the value at ``place``, with references resolved."""
        if place not in self._values:
            return _ELSEWHERE
        if place in self._sizes:
            if not (size := self._sizes[place]):
                raise ValueError(
                    f"{place or 'the file'}: a reference leads back to where it stands; write the value out"
                )
            return size
        self._sizes[place] = 0
        value = self._values[place]
        if isinstance(value, (dict, list)):
            below = value if isinstance(value, dict) else range(len(value))
            size = 1 + sum(1 + self._size(_below(place, key)) for key in below)
        else:
            targets = _REFERENCE.findall(value) if isinstance(value, str) else ()
            size = 1 + len(str(value)) + sum(self._size(_target(place, each)) for each in targets if ":" not in each)
        self._sizes[place] = size
        return size


def _nodes(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    yield place, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield from _nodes(below, _below(place, key))


def _below(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


def _target(place: str, reference: str) -> str:
    """Return the dotted name that a reference at ``place`` leads to. The reference may be relative to ``place``."""
    name = reference.strip().replace("[", ".").replace("]", "")
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    parts = place.split(".")
    return ".".join([*parts[: max(0, len(parts) - dots)], name[dots:]]).strip(".")
