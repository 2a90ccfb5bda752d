"""The memory layout of a bubble board: 64-bit words in native byte order, in a file private to its owner.

A board is a header, a predicted step and a ring buffer of measured steps. A step is a row of *edges*
(times): edge 0 is the begin of the step, when the rank is idle; after that odd edges start work and
even edges end it. The work started by the last edge (the optimiser's step, reading the next batch)
lasts until the next step begins.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from weft.conf.host.private import shared_memory_folder
from weft.conf.host.shared_words import map_words
from weft.conf.schema import WeftConfig

MAGIC = int.from_bytes(b"weftbord", "little")
VERSION = 1

HEADER = 16
"""Number of words before the predicted step."""
ROW_HEADER = 4
"""Number of words of a row before its edges."""


class Header:
    """Indices of the header's words."""

    MAGIC, VERSION, ROWS, EDGES, RANK, PID, STARTED, HEARTBEAT, STEP, BELL, PLANNED = range(11)


class RowHeader:
    """Indices of a row's header words. A row is a seqlock: its generation is odd while it is being reset."""

    GENERATION, STEP, KIND, COUNT = range(4)


ROWS = 8
"""Number of steps kept, including the running one."""


def num_words(rows: int, edges: int) -> int:
    """Return the number of words of a board."""
    return HEADER + edges + rows * (ROW_HEADER + edges)


def row_at(step: int, rows: int, edges: int) -> int:
    """Return the index of the first word of a step's row. Steps are numbered from 1."""
    return HEADER + edges + (step % rows) * (ROW_HEADER + edges)


def boards_folder(config: WeftConfig, user: int) -> Path:
    """Return the folder of a run's boards on this host.

    Args:
        user: numeric id of the user that trains.
    """
    if config.inference.boards:
        return Path(config.inference.boards).expanduser().absolute()
    return shared_memory_folder(user) / config.train.name


def board_path(folder: str | Path, rank: int) -> Path:
    """Return the path of a rank's board in a run's folder of boards."""
    return Path(folder) / f"rank{rank}.board"


def map_board(path: Path) -> tuple[mmap.mmap, tuple[int, int]]:
    """Map an existing board. Return its memory, and the (device, inode) of its file.

    Raises:
        OSError: it cannot be opened.
        ValueError: wrong owner or permissions, or not a board of this version.
    """
    memory, found = map_words(path, "bubble board", magic=MAGIC, version=VERSION, least=HEADER)
    words = memoryview(memory).cast("Q")
    if not words[Header.ROWS] or len(words) != num_words(words[Header.ROWS], words[Header.EDGES]):
        raise ValueError(
            f"{path}: {len(words)} words, its header says {num_words(words[Header.ROWS], words[Header.EDGES])}"
        )
    return memory, (found.st_dev, found.st_ino)
