"""File operations that are on the disk when they return, or were never begun."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

Buffer = bytes | memoryview


def make_folder(path: Path) -> None:
    """Make a folder and those above it; it may exist."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def make_new_folder(path: Path) -> None:
    """Make a folder for its owner alone, and those above it.

    Raises:
        OSError: something of that name is there, be it a link to a folder.
    """
    make_folder(path.parent)
    os.mkdir(path, 0o700)
    sync_folder(path.parent)


def write(path: Path, chunks: Iterable[Buffer]) -> int:
    """Write a new file; returns its size in bytes.

    Raises:
        OSError: ``path`` exists, or the disk is full.
    """
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def rename(path: Path, new: Path) -> None:
    """Rename a folder in one indivisible step, within its parent."""
    assert path.parent == new.parent, (path, new)
    os.rename(path, new)
    sync_folder(new.parent)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a link, but not what it leads to; gone already is fine."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make new names in a folder last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
