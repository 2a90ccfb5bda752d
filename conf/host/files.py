"""Files that readers find whole or not at all, whatever becomes of their writer."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any
from uuid import uuid4

from weft.conf.host.owners import is_trusted


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``, which replaces ``path`` when the block ends.

    Missing folders are created. After an error the temporary file is removed, and ``path`` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")  # hosts that share a folder may share process numbers
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a UTF-8 file, line ends as they are."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text}: not a finite number")
    return value


@dataclass(frozen=True)
class JsonCache:
    """Entries by name in a JSON file that several processes may write; the last writer of an entry wins.

    Attributes:
        path: the file.
    """

    path: Path

    def read(self) -> dict[str, Any]:
        """All entries; none where there is no file, or one that is not readable or that others could have written.

        A number that is not finite makes it unreadable, because plans are based on the cached values.
        """
        if not is_trusted(self.path):
            return {}
        try:
            found = json.loads(self.path.read_text(), parse_float=_finite, parse_constant=_finite)
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def add(self, entries: Mapping[str, Any]) -> None:
        """Add ``entries``, which replace existing ones of the same names."""
        self.replace({**self.read(), **entries})

    def remove(self, names: Collection[str]) -> None:
        """Remove entries; the file, if none is left."""
        if left := {name: value for name, value in self.read().items() if name not in names}:
            self.replace(left)
        else:
            self.path.unlink(missing_ok=True)

    def replace(self, entries: Mapping[str, Any]) -> None:
        """Replace all entries by ``entries``."""
        text = json.dumps(entries, indent=1)
        with replacing(self.path) as draft:
            draft.touch(mode=0o600)
            draft.write_text(text)
