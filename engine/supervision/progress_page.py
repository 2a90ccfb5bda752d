"""The progress of a host's ranks: a page of shared memory that ranks write and their agent reads.

A page is a header and a record per local rank, in 64-bit words in native byte order. A rank's progress is one word, so
that reads are atomic. Updating it takes two stores. Writers never wait for a reader. An agent owns its page and the
files whose names start with the page's. Agents remove those of killed runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from signal import SIGKILL
from sys import stderr
from tempfile import gettempdir
from time import time
from typing import NamedTuple

from weft.conf.host.private import shared_memory_folder
from weft.conf.host.processes import own_start, process_state
from weft.conf.host.shared_words import make_words, map_words, publish
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.messages import LinkReading, RowProgress

MAGIC = int.from_bytes(b"weftprog", "little")
VERSION = 3
ATTEMPTS = 100
"""Number of reads of a record under change, after which it counts as empty."""
HEADER = 8
"""Words before the first record."""
RECORD = 88
"""Words of a record, including those of its links."""
FIRST_LINK = 24
MOST_LINKS = 8
"""Most links between sites of one rank whose counters fit into its record."""
LINK = 8


class Header(IntEnum):
    """Indices of the header's words."""

    MAGIC, VERSION, RANKS, OWNER, STARTED = range(5)


class Word(IntEnum):
    """Indices of a record's words. The generation is odd while the record is reset for another attempt."""

    (
        GENERATION,
        ATTEMPT,
        RANK,
        PID,
        STARTED,
        PHASE,
        PROGRESS,
        MOVED,
        KIND,
        TICK,
        BUSY,
        MEASURED,
        DEVICE,
        KEPT,
        LINKS,
    ) = range(15)


# Progress in one word: step, slots that have ended, whether the next has begun, number of wait marks in it.
_WAITS_BITS, _DONE_BITS, _STEP_BITS = 12, 21, 30
MOST_WAITS = (1 << _WAITS_BITS) - 1
BEGUN = 1 << _WAITS_BITS
DONE = BEGUN << 1
STEP = DONE << _DONE_BITS
MOST_DONE, MOST_STEP = (1 << _DONE_BITS) - 1, (1 << _STEP_BITS) - 1


def progress_of(word: int) -> RowProgress:
    """Decode the progress in a word."""
    return RowProgress(word // STEP & MOST_STEP, word // DONE & MOST_DONE, bool(word & BEGUN), word & MOST_WAITS)


class Reading(NamedTuple):
    """The contents of a rank's record.

    Attributes:
        attempt: number of the attempt that the rank takes part in.
        started: start time of the process, in clock ticks since boot. Unique together with the pid.
        moved_ns: time of its last progress, by `time.monotonic_ns` of its host.
        num_microbatches: number of micro-batches of the step, which identifies the schedule; 0 if no plan's.
        tick: counter of the background thread. It does not change while another thread holds the interpreter's lock.
        busy_ns: time of the rank's own computations, over `measured_steps`.
        measured_steps: steps whose computations have been measured.
        device_bytes: memory that the process has allocated on its device.
        kept_step: step of the newest memory checkpoint that is complete on all hosts, or 0 before the first.
        links: readings of the links to ranks at other sites.
    """

    attempt: int
    rank: int
    pid: int
    started: int
    phase: Phase
    progress: RowProgress
    moved_ns: int
    num_microbatches: int
    tick: int
    busy_ns: int
    measured_steps: int
    device_bytes: int
    kept_step: int
    links: tuple[LinkReading, ...]


def make_page(path: Path, num_ranks: int) -> None:
    """Create an empty page in a folder that is private to this user. It replaces an existing page.

    Raises:
        ValueError: the folder belongs to someone else or is open to others.
        OSError: there is no space for it.
    """
    with make_words(path, HEADER + num_ranks * RECORD) as memory, memoryview(memory) as whole, whole.cast("Q") as words:
        words[Header.RANKS], words[Header.OWNER], words[Header.STARTED] = num_ranks, os.getpid(), own_start()
        words[Header.VERSION], words[Header.MAGIC] = VERSION, MAGIC
    publish(path)


def owner(path: Path) -> tuple[int, int]:
    """Return the pid of the process that created a page, and its start time.

    Raises:
        ValueError: see `map_page`.
    """
    words = map_page(path)
    return words[Header.OWNER], words[Header.STARTED]


def map_page(path: Path) -> memoryview:
    """Map a page, and return its words.

    Raises:
        ValueError: there is no page, others have access to it, or it has another version.
    """
    try:
        memory, _ = map_words(path, "progress page", magic=MAGIC, version=VERSION, least=HEADER)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; WEFT_PROGRESS names the page that this host's agent made"
        ) from error
    words = memoryview(memory).cast("Q")
    if len(words) != HEADER + words[Header.RANKS] * RECORD:
        raise ValueError(f"{path}: {len(words)} words do not hold {words[Header.RANKS]} ranks; remove it")
    return words


class ProgressReader:
    """The agent's read access to its host's page."""

    def __init__(self, path: Path) -> None:
        """Open a page that `make_page` created.

        Raises:
            ValueError: there is no page, others have access to it, or it has another version.
        """
        self._words = map_page(path)

    def __len__(self) -> int:
        return self._words[Header.RANKS]

    def read(self, local_rank: int) -> Reading | None:
        """Return the record of a local rank, or None if nothing has been written to it yet."""
        first = HEADER + local_rank * RECORD
        words = self._words[first : first + RECORD]
        for _ in range(ATTEMPTS):
            generation = words[Word.GENERATION]
            values = words[: Word.LINKS + 1].tolist()
            links = [self._link(words, number) for number in range(min(values[Word.LINKS], MOST_LINKS))]
            if not generation & 1 and words[Word.GENERATION] == generation:
                break
        else:
            return None
        if not generation:
            return None
        return Reading(
            attempt=values[Word.ATTEMPT],
            rank=values[Word.RANK],
            pid=values[Word.PID],
            started=values[Word.STARTED],
            phase=Phase(values[Word.PHASE]) if values[Word.PHASE] in _PHASES else Phase.imports,
            progress=progress_of(values[Word.PROGRESS]),
            moved_ns=values[Word.MOVED],
            num_microbatches=values[Word.KIND],
            tick=values[Word.TICK],
            busy_ns=values[Word.BUSY],
            measured_steps=values[Word.MEASURED],
            device_bytes=values[Word.DEVICE],
            kept_step=values[Word.KEPT],
            links=tuple(links),
        )

    @staticmethod
    def _link(words: memoryview, number: int) -> LinkReading:
        at = FIRST_LINK + number * LINK
        *counters, rtt_ns, peak_bps = words[at : at + len(LinkReading._fields)].tolist()
        return LinkReading._make((*counters, rtt_ns / 1e9, peak_bps))


_PHASES = frozenset(Phase)
PREFIX = "progress-"
GONE_S = 5.0
"""Timeout for a killed agent to end, in seconds."""
OLD_S = 1800.0
"""Age in seconds from which resources without an owner are removed. Until then their run may start another agent."""


def page_path(run_folder: Path, host: str) -> Path:
    """Return the path of a host's progress page, in this user's shared memory. Related files have it as a prefix."""
    name = hashlib.sha256(f"{run_folder.absolute()} {host}".encode()).hexdigest()[:16]
    return shared_memory_folder(os.getuid()) / f"{PREFIX}{name}"


def take_page(page: Path, num_ranks: int) -> Path:
    """Create a host's page in shared memory or, if that has no space or does not exist, in the temporary folder.

    An earlier agent that still owns the page is killed with its ranks. It was stopped or unreachable, and its ranks use
    resources that their successors need, such as GPUs and ports.

    Raises:
        OSError, ValueError: the page can be created in neither folder.
    """
    with suppress(ValueError):
        _end(*owner(page))
    try:
        make_page(page, num_ranks)
        return page
    except (OSError, ValueError) as error:
        other = Path(gettempdir(), page.parent.name, page.name)
        make_page(other, num_ranks)
        print(f"weft: {page.parent}: {error}; what the agent shares with its ranks lies in {other.parent}", file=stderr)
        return other


def _end(pid: int, started: int) -> None:
    """Kill another agent and wait until it has ended. The start time must match, because pids are reused."""
    state = process_state(pid)
    if pid == os.getpid() or state is None or state.started != started:
        return
    with suppress(OSError):  # it has ended in the meantime
        if f"{__package__}.agent.agent".encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return
        ended = os.pidfd_open(pid)
        os.kill(pid, SIGKILL)
        select.select([ended], [], [], GONE_S)
        os.close(ended)


class Ownership:
    """An agent's lock on its page. The kernel releases it when the agent ends."""

    def __init__(self, page: Path) -> None:
        """Lock an existing page, unless another agent of the same host still has the lock."""
        self._page = page
        self._file = os.open(page, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def renew(self) -> None:
        """Update the page's time of use. Call this regularly."""
        with suppress(OSError):
            os.utime(self._page)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


def remove_stale(folder: Path, own: str, *, now: float | None = None) -> list[str]:
    """Remove resources of runs whose agents were killed, if they have not been used for `OLD_S`.

    Args:
        folder: this user's folder in shared memory.
        own: name of the page to ignore.
        now: time of day in seconds since 1970, by default the current time.

    Returns:
        The names of the removed pages. Files whose names start with these are removed, too.
    """
    limit, gone = (time() if now is None else now) - OLD_S, []
    for name in sorted({path.name.partition(".")[0] for path in folder.glob(f"{PREFIX}*")} - {own}):
        parts = [path for path in folder.glob(f"{name}*") if path.name.partition(".")[0] == name]
        with suppress(OSError):
            if all(path.lstat().st_mtime < limit for path in parts) and not is_owned(folder / name):
                for path in parts:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                gone.append(name)
    return gone


def is_owned(page: Path) -> bool:
    """True if an agent owns a page. Raise OSError if the page exists, and cannot be opened."""
    try:
        file = os.open(page, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
