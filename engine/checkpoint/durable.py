"""Durable file operations: when they return, their effect survives a crash."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of the operating system for a full disk."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read, or applied to this model."""


class OtherModelError(CheckpointError):
    """A checkpoint of another model than this run's. Older checkpoints are not tried."""


class OtherBaseError(OtherModelError):
    """A checkpoint whose run has another base model than this run."""


class StorageError(CheckpointError):
    """Storage is read-only, failing or unavailable, possibly only temporarily."""


class NoSpaceError(StorageError):
    """There is not enough space for a checkpoint."""


BY_NAME = {
    each.__name__: each for each in (CheckpointError, OtherModelError, OtherBaseError, StorageError, NoSpaceError)
}
"""Classes of errors by the name under which a rank reports them to others."""


def explain(folder: Path, error: Exception) -> CheckpointError:
    """Return the `CheckpointError` for an exception raised while reading or writing in ``folder``."""
    if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
        return NoSpaceError(
            f"checkpoint in {folder}: no space left ({error.strerror}); earlier checkpoints are unchanged. Free "
            "space or raise the quota, lower checkpoint.keep, or choose another train.output_dir"
        )
    if isinstance(error, OSError):
        return StorageError(f"checkpoint in {folder}: {error}; earlier checkpoints are unchanged")
    return CheckpointError(f"checkpoint in {folder}: {type(error).__name__}: {error}")


Buffer = bytes | memoryview


def make_folder(path: Path) -> None:
    """Create a folder, which may exist, and its missing parents."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def make_new_folder(path: Path) -> None:
    """Create a folder that is private to its owner, and its missing parents.

    Raises:
        OSError: the path exists already, even as a link to a folder.
    """
    make_folder(path.parent)
    os.mkdir(path, 0o700)
    sync_folder(path.parent)


def write(path: Path, chunks: Iterable[Buffer]) -> int:
    """Write a new file, and return its size in bytes. Raise OSError if ``path`` exists, or the disk is full."""
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def rename(path: Path, new: Path) -> None:
    """Atomically rename a folder within its parent."""
    assert path.parent == new.parent, (path, new)
    os.rename(path, new)
    sync_folder(new.parent)


def remove(path: Path) -> None:
    """Remove a folder with its contents. A link is removed without its target, and a missing path is accepted."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that new names in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
