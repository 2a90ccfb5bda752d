"""Atomic file writes: readers find a file complete or not at all, even if its writer fails. Temporary folders."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, gettempdir
from time import time
from typing import Any
from uuid import uuid4

from weft.conf.host.owners import is_trusted

LOCKED_WITHIN_S = 60.0
"""Seconds after which a folder in use has been locked."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``, which replaces ``path`` when the block ends.

    Missing folders are created. After an error the temporary file is removed, and ``path`` is unchanged.

    Raises:
        ValueError: ``path`` is a device, a pipe or a socket, which a file must not replace.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: a device, pipe or socket cannot be replaced by a file; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")  # hosts that share a folder may share process numbers
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Atomically write a UTF-8 file, without conversion of line ends."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="")


def require_writable(option: str, file: Path) -> None:
    """Check before the work for it begins that a file can be written. Raise ValueError that names the option if not."""
    is_too_long = len(os.fsencode(file.name)) > 255 - len(f".{uuid4().hex}.")
    if is_too_long or file.is_dir() or not os.access(file.absolute().parent, os.W_OK):
        raise ValueError(f"{option} {file}: cannot be written; name a file in a folder that is there")


@contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """Yield a temporary folder that is removed afterwards, and remove those of earlier processes that were killed.

    A folder in use is locked by its process and the processes that this one forks.
    """
    for left in Path(gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            folder = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(folder)
                if found.st_uid == os.geteuid() and time() - found.st_mtime > LOCKED_WITHIN_S:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    rmtree(left, ignore_errors=True)
            finally:
                os.close(folder)
    with TemporaryDirectory(prefix=prefix) as name:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield name
        finally:
            os.close(folder)


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text}: not a finite number")
    return value


@dataclass(frozen=True)
class JsonCache:
    """Entries by name in a JSON file that several processes may write. The last writer of an entry wins."""

    path: Path

    def read(self) -> dict[str, Any]:
        """Return all entries.

        There are none if the file does not exist, cannot be read, or could have been written by others. A number that
        is not finite counts as unreadable, because plans are based on the cached values.
        """
        if not is_trusted(self.path):
            return {}
        try:
            found = json.loads(self.path.read_text(), parse_float=_finite, parse_constant=_finite)
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def add(self, entries: Mapping[str, Any]) -> None:
        """Add ``entries``. They replace existing entries with the same names."""
        self.replace({**self.read(), **entries})

    def remove(self, names: Collection[str]) -> None:
        """Remove the entries with these names. If none is left, remove the file."""
        if left := {name: value for name, value in self.read().items() if name not in names}:
            self.replace(left)
        else:
            self.path.unlink(missing_ok=True)

    def replace(self, entries: Mapping[str, Any]) -> None:
        """Replace the file's contents by ``entries``."""
        text = json.dumps(entries, indent=1)
        with replacing(self.path) as draft:
            draft.touch(mode=0o600)
            draft.write_text(text)
