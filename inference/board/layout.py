"""The bubble board's memory: 64-bit words in native order, in a file of the owner alone.

A board is a header, a predicted step and a ring of measured ones. A step is a row of *edges*:
edge 0 is the moment at which the step begins and the rank has nothing to compute; from then on
odd edges start work and even edges end it. The work that the last edge starts (the optimiser's
step, reading the next batch) lasts until the next step begins.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from weft.conf.private import private_folder

MAGIC = int.from_bytes(b"weftbord", "little")
VERSION = 1
WORD_BYTES = 8

HEADER = 16
"""Words before the predicted step."""
ROW_HEADER = 4
"""Words of a row before its edges."""


class Header:
    """Indices of the header's words."""

    MAGIC, VERSION, ROWS, EDGES, RANK, PID, STARTED, HEARTBEAT, STEP, BELL, PLANNED = range(11)


class RowHeader:
    """Indices of a row's words; a row is a seqlock, whose generation is odd while it is cleared for another step."""

    GENERATION, STEP, KIND, COUNT = range(4)


ROWS = 8
"""Steps that are remembered, the running one included."""


def num_words(rows: int, edges: int) -> int:
    """Words of a whole board."""
    return HEADER + edges + rows * (ROW_HEADER + edges)


def row_at(step: int, rows: int, edges: int) -> int:
    """The first word of the row of a step; steps count from 1."""
    return HEADER + edges + (step % rows) * (ROW_HEADER + edges)


def board_path(folder: str | Path, rank: int) -> Path:
    """The board of a rank in a run's folder of boards."""
    return Path(folder) / f"rank{rank}.board"


def map_board(path: Path) -> tuple[mmap.mmap, tuple[int, int]]:
    """An existing board's memory, and the identity of its file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it belongs to someone else, is open to others, or is no board of this version.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(f"{path}: not a file of this user alone; remove it, or run as the user who trains")
        if found.st_size < HEADER * WORD_BYTES:
            raise ValueError(f"{path}: {found.st_size} bytes are no bubble board; remove it")
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    words = memoryview(memory).cast("Q")
    if words[Header.MAGIC] != MAGIC or words[Header.VERSION] != VERSION:
        raise ValueError(f"{path}: not a bubble board of version {VERSION}; trainer and worker need the same Weft")
    if not words[Header.ROWS] or len(words) != num_words(words[Header.ROWS], words[Header.EDGES]):
        raise ValueError(
            f"{path}: {len(words)} words, its header says {num_words(words[Header.ROWS], words[Header.EDGES])}"
        )
    return memory, (found.st_dev, found.st_ino)


def make_board(path: Path, words: int) -> mmap.mmap:
    """Zeroed memory behind a file that gets its name by `publish`.

    Raises:
        ValueError: the folder belongs to someone else or is open to others.
    """
    private_folder(path.parent)
    draft = _draft(path)
    draft.unlink(missing_ok=True)
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, words * WORD_BYTES)
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def publish(path: Path) -> None:
    """Give a board that `make_board` made its name; one that had it before loses it."""
    _draft(path).replace(path)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
