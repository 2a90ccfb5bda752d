"""A ring of a rank's last events in shared memory, which outlives the rank. Loads without torch.

The rank or its prefill worker writes, and a collector of the same user reads. Writing takes two stores and never
waits. A record is two actions (the second is 0 unless the slot is a strand pair), a step, and the start and end by
`time.perf_counter`, which is one clock for all processes of a host.
"""

from __future__ import annotations

import hashlib
import os
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from struct import Struct
from time import perf_counter, time
from typing import NamedTuple

import numpy as np

from weft.conf.host.private import shared_memory_folder
from weft.conf.host.processes import own_identity, start_ticks
from weft.conf.host.shared_words import WORD_BYTES, make_words, map_words, publish
from weft.pipeline.action import Action, Op, Slot, slot_text

MAGIC = int.from_bytes(b"weftring", "little")
VERSION = 1
PREFIX = "events-"
HEADER = 16
"""Words before the first record."""
RECORD = Struct("3Q2d")
DTYPE = np.dtype([("first", "u8"), ("second", "u8"), ("step", "u8"), ("start", "f8"), ("end", "f8")])
"""A record, as numpy reads it."""
RECORD_WORDS = RECORD.size // WORD_BYTES
NO_WORDS = np.empty((0, RECORD_WORDS), "u8")
CURRENT = Struct("3Qd")
PREFILL = "prefill"
LINKS = "links"
"""First part of the names of files with the counters of ranks' links, before the rank."""
SECTIONS = ("data", "gradients", "weights", "sums", "checkpoint", "evaluation", "step", PREFILL)
"""Kinds of events besides actions: reading the batch, waits for collectives, stalls between steps, whole steps, and
chunks of prompts that a prefill worker computes."""
KINDS = (*(op.value for op in Op), *SECTIONS)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS, start=1)}


class Header(IntEnum):
    """Indices of the header's words. Those from ``FIRST`` to ``SINCE`` describe the slot that runs."""

    MAGIC, VERSION, RANK, PID, STARTED, CAPACITY, WRITTEN, WALL, CLOSED, FIRST, SECOND, STEP, SINCE, COST = range(14)


class Event(NamedTuple):
    """The kind of an event: an operation or one of `SECTIONS`, with its virtual stage and micro-batch, or -1.

    A prefill has its number of tokens instead of a micro-batch.
    """

    kind: str
    stage: int = -1
    microbatch: int = -1


def encode(kind: str, stage: int = -1, microbatch: int = -1) -> int:
    """Return an event's kind as a word, which is not 0."""
    return _NUMBERS[kind] | (stage + 1) << 8 | (microbatch + 1) << 32


def encode_slot(slot: Slot) -> tuple[int, int]:
    """Return a slot as two words."""
    words = [encode(a.op.value, a.stage, -1 if a.microbatch is None else a.microbatch) for a in slot]
    return words[0], words[1] if len(words) > 1 else 0


def decode(word: int) -> Event | None:
    """Return the event that `encode` wrote, or None for 0 and for words that it did not write."""
    number = word & 0xFF
    return Event(KINDS[number - 1], (word >> 8 & 0xFFFFFF) - 1, (word >> 32) - 1) if 0 < number <= len(KINDS) else None


@lru_cache(4096)
def event_text(first: int, second: int) -> str:
    """Return two words as text: a slot such as ``2F7``, a section's name, or ``prefill 64``. Empty if unknown."""
    found = [event for word in (first, second) if (event := decode(word)) is not None]
    if not found:
        return ""
    if found[0].kind in SECTIONS:
        return found[0].kind if found[0].microbatch < 0 else f"{found[0].kind} {found[0].microbatch}"
    return slot_text(tuple(Action(Op(kind), stage, None if m < 0 else m) for kind, stage, m in found))


def rings_folder(run_folder: Path) -> Path:
    """Return the folder in shared memory with the rings of a run's ranks on this host."""
    name = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:16]
    return shared_memory_folder(os.getuid()) / f"{PREFIX}{name}"


def epoch_s() -> float:
    """Return the seconds since 1970 at which the host's `time.perf_counter` was 0, by its clock now."""
    pauses = []
    for _ in range(5):
        before, now, after = perf_counter(), time(), perf_counter()
        pauses.append((after - before, now - (before + after) / 2))
    return min(pauses)[1]


class RingWriter:
    """The rank's side of its ring."""

    def __init__(self, folder: Path, rank: int, capacity: int, kind: str = "rank") -> None:
        """Create the ring of ``rank``, with ``capacity`` records. It replaces an older one.

        Args:
            kind: its file's name before the rank.

        Raises:
            ValueError: the folder is not private to this user.
            OSError: there is no space for it.
        """
        self._path = folder / f"{kind}{rank}"
        self._memory = make_words(self._path, HEADER + capacity * RECORD.size // WORD_BYTES)
        words = self._words = memoryview(self._memory).cast("Q")
        words[Header.RANK], words[Header.CAPACITY] = rank, capacity
        words[Header.PID], words[Header.STARTED] = own_identity()
        words[Header.WALL] = round(epoch_s() * 1e9)
        words[Header.VERSION], words[Header.MAGIC] = VERSION, MAGIC
        self._inode = publish(self._path)
        self._written, self._at = 0, HEADER * WORD_BYTES
        self._end = len(self._memory)
        self._count, self._current = int(Header.WRITTEN), Header.FIRST * WORD_BYTES

    def write(self, first: int, second: int, step: int, start: float, end: float) -> None:
        """Add a record. See `encode_slot`."""
        RECORD.pack_into(self._memory, self._at, first, second, step, start, end)
        self._at += RECORD.size
        if self._at == self._end:
            self._at = HEADER * WORD_BYTES
        self._written = self._words[self._count] = self._written + 1

    def state_cost(self, event_s: float) -> None:
        """Publish the processor time that an event costs the rank."""
        self._words[Header.COST] = round(event_s * 1e9)

    def remove(self) -> None:
        """Remove the file, so that no collector finds it. What is written goes nowhere."""
        self._path.unlink(missing_ok=True)

    def begin(self, first: int, second: int, step: int, start: float) -> None:
        """Publish the slot that runs from now on."""
        CURRENT.pack_into(self._memory, self._current, first, second, step, start)

    @property
    def is_lost(self) -> bool:
        """True if its file was removed or replaced, so that no collector reads what is written."""
        try:
            return os.stat(self._path).st_ino != self._inode
        except OSError:
            return True

    def close(self, *, finished: bool) -> None:
        """Mark that no record will follow, and whether the run has finished. The file stays for the collector."""
        self._words[Header.CLOSED] = 1 + finished


class RingReader:
    """The collector's side of a ring.

    Attributes:
        rank, pid: the rank, and its process.
        inode: number of its file, which another ring of the rank replaces.
        lost: records that were overwritten before they were read.
    """

    def __init__(self, path: Path) -> None:
        """Map a ring.

        Raises:
            ValueError: it is not a ring of this version, or other users can write to it.
            OSError: it cannot be opened.
        """
        memory, found = map_words(path, "ring of events", magic=MAGIC, version=VERSION, least=HEADER)
        self._path, self._memory = path, memory
        words = self._words = memoryview(memory).cast("Q")
        size = found.st_size - HEADER * WORD_BYTES
        if size != words[Header.CAPACITY] * RECORD.size:
            raise ValueError(f"{path}: {size} bytes do not hold {words[Header.CAPACITY]} records; remove it")
        self._records = np.frombuffer(memory, dtype="u8", offset=HEADER * WORD_BYTES).reshape(-1, RECORD_WORDS)
        self.rank, self.pid, self._started = words[Header.RANK], words[Header.PID], words[Header.STARTED]
        self.wall_s = words[Header.WALL] / 1e9
        """Seconds since the epoch when the host's `time.perf_counter` was 0, by its clock when the rank began."""
        self.inode = found.st_ino
        self._seen, self._known = 0, words[Header.WRITTEN]
        self.lost = 0

    def read(self) -> np.ndarray:
        """Return the records since the last call, oldest first."""
        return self.read_words().view(DTYPE)[:, 0]

    def read_words(self) -> np.ndarray:
        """Return what `read` does as words, a row per record: copying records would compare their types each time."""
        written = self._words[Header.WRITTEN]
        if written == self._seen:
            return NO_WORDS
        records, capacity = self._records, len(self._records)
        first = max(self._seen, written - capacity)
        at, count = first % capacity, written - first
        found = records[at : at + count].copy()
        if at + count > capacity:
            found = np.concatenate([found, records[: at + count - capacity]])
        overwritten = self._words[Header.WRITTEN] - capacity + 1  # the next record may be half written
        skip = min(max(0, overwritten - first), len(found)) if written > capacity else 0
        self.lost += first + skip - self._seen
        self._seen = written
        return found[skip:]

    @property
    def is_closed(self) -> bool:
        """True if no record will follow, because the rank has closed the ring or has ended.

        A rank that has written since the last call has not ended by then. So few processes are examined.
        """
        words, known = self._words, self._known
        if words[Header.CLOSED]:
            return True
        self._known = words[Header.WRITTEN]
        return self._known == known and start_ticks(self.pid) != self._started

    @property
    def is_finished(self) -> bool:
        """True if the rank has closed the ring at the end of the run, so that no other ring follows."""
        return self._words[Header.CLOSED] > 1

    def remove(self) -> None:
        """Remove the file. What it holds can still be read."""
        self._path.unlink(missing_ok=True)

    def current(self) -> dict[str, object]:
        """Return what the rank does now: its slot and step, the slot's begin, and what an event costs (0: unknown)."""
        first, second, step, since = CURRENT.unpack_from(self._memory, Header.FIRST * WORD_BYTES)
        return {
            "rank": self.rank,
            "slot": event_text(first, second),
            "step": step,
            "since": since + self.wall_s,
            "alive": not self.is_closed,
            "event_s": self._words[Header.COST] / 1e9,
        }
