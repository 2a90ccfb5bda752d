"""Files of 64-bit words that processes of one user share. Their first two words are a magic number and a version."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from struct import Struct

from weft.conf.host.private import private_folder

WORD_BYTES = 8
_HEAD = Struct("2Q")


def make_words(path: Path, words: int) -> mmap.mmap:
    """Create a file under a temporary name, zeroed; `publish` gives it its final name.

    Raises:
        ValueError: the folder is not private to this user.
        OSError: there is no space for it.
    """
    private_folder(path.parent)
    draft = _draft(path)
    draft.unlink(missing_ok=True)
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, words * WORD_BYTES)  # writing to a hole may raise SIGBUS
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def publish(path: Path) -> int:
    """Rename a file of `make_words` to its final name, replacing an older one. Return its inode."""
    inode = _draft(path).stat().st_ino
    _draft(path).replace(path)
    return inode


def map_words(path: Path, what: str, *, magic: int, version: int, least: int) -> tuple[mmap.mmap, os.stat_result]:
    """Map an existing file. Return its memory and its state.

    Args:
        what: name of its content in errors.
        least: number of words of the shortest valid file.

    Raises:
        OSError: it cannot be opened.
        ValueError: wrong owner or permissions, or not of this version.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(f"{path}: not private to this user alone; remove it, or run as the user who trains")
        if found.st_size < least * WORD_BYTES:
            raise ValueError(f"{path}: {found.st_size} bytes are too few and no {what}; remove it")
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    if memory[: _HEAD.size] != _HEAD.pack(magic, version):
        raise ValueError(f"{path}: not a {what} of version {version}; all processes of the run need the same Weft")
    return memory, found


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
