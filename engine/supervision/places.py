"""Where each rank of a host is in its step: a page of shared memory that ranks write and their agent reads.

A page is a header and a record per local rank, in 64-bit words in native order. A place is one
word, so a reader never sees half of one, and a mark is two stores. Nothing here waits for a reader.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

from weft.conf.private import private_folder
from weft.conf.processes import own_start
from weft.pipeline.action import COMPUTE, Op, Slot
from weft.pipeline.culprit import Place

MAGIC = int.from_bytes(b"weftplac", "little")
VERSION = 2
WORD_BYTES = 8
TICK_S = 0.1
"""Seconds between ticks of a rank's background thread."""
PEAK_TICKS = 20
"""Ticks whose rates the fastest of a link is taken from."""
ATTEMPTS = 100
"""Readings of a record that is being handed to another attempt, before it counts as empty."""

HEADER = 8
"""Words before the first record."""
RECORD = 88
"""Words of a record: its own, then those of its links."""
FIRST_LINK = 24
MOST_LINKS = 8
"""Links between sites of one rank whose counters have room."""
LINK = 8


class Header(IntEnum):
    """Indices of the header's words."""

    MAGIC, VERSION, RANKS = range(3)


class Word(IntEnum):
    """Indices of a record's words. The generation is odd while the record is handed to another attempt."""

    (
        GENERATION,
        ATTEMPT,
        RANK,
        PID,
        STARTED,
        PHASE,
        PLACE,
        MOVED,
        KIND,
        TICK,
        BUSY,
        MEASURED,
        BEGAN,
        DEVICE,
        KEPT,
        LINKS,
    ) = range(16)


class Phase(IntEnum):
    """What a rank is at; how long it may stand still depends on it."""

    imports = 0
    setup = 1
    first_step = 2
    steady = 3
    evaluation = 4
    checkpoint = 5
    finishing = 6
    parked = 7


# A place in one word: step, slots that have ended, whether the next has begun, waits in it entered and left.
_WAITS_BITS, _DONE_BITS, _STEP_BITS = 12, 21, 30
_MOST_WAITS = (1 << _WAITS_BITS) - 1
_BEGUN = 1 << _WAITS_BITS
_DONE = _BEGUN << 1
_STEP = _DONE << _DONE_BITS
_PLACE, _MOVED = int(Word.PLACE), int(Word.MOVED)
_MOST_DONE, _MOST_STEP = (1 << _DONE_BITS) - 1, (1 << _STEP_BITS) - 1


def place_of(word: int) -> Place:
    """The place that a word stands for."""
    return Place(word // _STEP & _MOST_STEP, word // _DONE & _MOST_DONE, bool(word & _BEGUN), word & _MOST_WAITS)


class LinkReading(NamedTuple):
    """Counters of a link to a rank at another site, since it was opened; see `weft.comm.wan.transport.LinkCounters`.

    Attributes:
        peer: global rank at the other end.
        ready: connections in use.
        rtt_s: shortest round trip; 0 before the first.
        peak_bps: bits that the peer acknowledged in a second, at their fastest in the last seconds.
    """

    peer: int
    sent_bytes: int
    received_bytes: int
    resent_chunks: int
    broken: int
    ready: int
    rtt_s: float
    peak_bps: int = 0


class Reading(NamedTuple):
    """What a rank's record says.

    Attributes:
        attempt: number of the attempt that the rank takes part in.
        rank: its global rank.
        pid: its process.
        started: when that began, in clock ticks since boot; names it for good together with the id.
        place: where it is in its row.
        moved_ns: when it came there, by `time.monotonic_ns` of its host.
        num_microbatches: of the step; they tell which schedule it runs.
        tick: of the background thread; stands still while something holds the interpreter's lock.
        busy_ns: time of the rank's own computations, over `measured_steps`.
        measured_steps: steps whose computations have been measured.
        began_ns: when the step began; 0 before the first.
        device_bytes: memory that the process has allocated on its device.
        kept_step: of the newest memory checkpoint that is whole on all hosts; 0 before the first.
        links: to ranks at other sites.
    """

    attempt: int
    rank: int
    pid: int
    started: int
    phase: Phase
    place: Place
    moved_ns: int
    num_microbatches: int
    tick: int
    busy_ns: int
    measured_steps: int
    began_ns: int
    device_bytes: int
    kept_step: int
    links: tuple[LinkReading, ...]


def make_page(path: Path, num_ranks: int) -> None:
    """Make an empty page in a folder of this user alone; one that was there before is replaced.

    Raises:
        ValueError: the folder belongs to someone else or is open to others.
    """
    private_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, (HEADER + num_ranks * RECORD) * WORD_BYTES)
        with mmap.mmap(file, 0) as memory, memoryview(memory) as whole, whole.cast("Q") as words:
            words[Header.RANKS] = num_ranks
            words[Header.VERSION], words[Header.MAGIC] = VERSION, MAGIC
    finally:
        os.close(file)
    draft.replace(path)


def _map_page(path: Path) -> memoryview:
    """The words of a page.

    Raises:
        ValueError: there is none, it is not this user's alone, or it is of another version.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; WEFT_PLACES names the page that this host's agent made") from error
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(f"{path}: not a file of this user alone; remove it")
        if found.st_size < HEADER * WORD_BYTES:
            raise ValueError(f"{path}: {found.st_size} bytes are no page of places; remove it")
        words = memoryview(mmap.mmap(file, 0)).cast("Q")
    finally:
        os.close(file)
    if words[Header.MAGIC] != MAGIC or words[Header.VERSION] != VERSION:
        raise ValueError(f"{path}: not a page of places of version {VERSION}; agent and ranks need the same Weft")
    if len(words) != HEADER + words[Header.RANKS] * RECORD:
        raise ValueError(f"{path}: {len(words)} words do not hold {words[Header.RANKS]} ranks; remove it")
    return words


class PlaceWriter:
    """One rank's record. A background thread ticks, for which it needs the interpreter's lock.

    `slot_begins` and `slot_ends` are those of a `weft.engine.observability.slots.SlotObserver`.
    """

    def __init__(self, path: Path, *, local_rank: int, rank: int, attempt: int) -> None:
        """Take the record of ``local_rank``, whoever had it before; the phase is set-up.

        Args:
            rank: global rank.

        Raises:
            ValueError: there is no such page, or it has no room for this rank.
        """
        page = _map_page(path)
        if not 0 <= local_rank < page[Header.RANKS]:
            raise ValueError(f"{path}: room for {page[Header.RANKS]} ranks, none for local rank {local_rank}")
        first = HEADER + local_rank * RECORD
        self._words = page[first : first + RECORD]
        self._ended = self._moved = self._busy_ns = self._depth = 0
        self._gauges: list[Callable[[], None]] = []
        self._gauging = threading.Lock()
        self._own: frozenset[Op] = COMPUTE
        self._closing = threading.Event()
        self.begin_attempt(attempt, rank=rank)
        self._thread = threading.Thread(target=self._tick, name="weft-place", daemon=True)
        self._thread.start()

    def begin_attempt(self, attempt: int, *, rank: int) -> None:
        """The same process takes part in another attempt, perhaps as another rank."""
        words = self._words
        words[Word.GENERATION] |= 1
        words[Word.ATTEMPT], words[Word.RANK] = attempt, rank
        words[Word.PID], words[Word.STARTED] = os.getpid(), own_start()
        self._ended = self._moved = self._busy_ns = self._depth = 0
        for index in (Word.PLACE, Word.KIND, Word.BUSY, Word.MEASURED, Word.BEGAN, Word.DEVICE, Word.KEPT, Word.LINKS):
            words[index] = 0
        words[Word.PHASE], words[Word.MOVED] = Phase.setup, monotonic_ns()
        self.drop_gauges()
        words[Word.GENERATION] += 1

    def enter(self, phase: Phase) -> None:
        """A phase begins; after a first step, the place shows that, too."""
        self._words[Word.PHASE] = phase
        if self._words[Word.PLACE]:
            self._mark(2)
        self._words[Word.MOVED] = monotonic_ns()

    def measure_device(self) -> None:
        """From now on the host's time tells nothing of computations; `add_busy` is told of the device's."""
        self._own = frozenset()

    def keep(self, step: int) -> None:
        """A memory checkpoint of ``step`` is whole on all hosts."""
        self._words[Word.KEPT] = step

    def add_busy(self, seconds: float) -> None:
        """A whole step has taken so long in computations."""
        self._busy_ns += round(seconds * 1e9)
        self._words[Word.BUSY] = self._busy_ns
        self._words[Word.MEASURED] += 1

    def begin_step(self, step: int, num_microbatches: int) -> None:
        """A step begins; steps count from 1."""
        words = self._words
        words[Word.KIND] = num_microbatches
        if self._own and self._ended >= _STEP:  # one has gone before
            words[Word.BUSY] = self._busy_ns
            words[Word.MEASURED] += 1
        self._ended = words[Word.PLACE] = (step & _MOST_STEP) * _STEP
        words[Word.MOVED] = words[Word.BEGAN] = monotonic_ns()

    def slot_begins(self, slot: Slot) -> None:
        """The next slot of the row begins."""
        words = self._words
        words[_PLACE] = self._ended | _BEGUN
        words[_MOVED] = self._moved = monotonic_ns()

    def slot_ends(self, slot: Slot) -> None:
        """It has ended."""
        words = self._words
        self._ended = words[_PLACE] = self._ended + _DONE
        words[_MOVED] = now = monotonic_ns()
        if slot[0][0] in self._own:
            self._busy_ns += now - self._moved

    def begin_wait(self) -> None:
        """From here on the rank waits for others; waits may be nested, and the outermost counts."""
        self._depth += 1
        if self._depth == 1:
            self._mark(1)

    def end_wait(self) -> None:
        """What `begin_wait` announced is over."""
        self._depth -= 1
        if not self._depth:
            self._mark(1)

    def _mark(self, marks: int) -> None:
        word = self._words[Word.PLACE]
        # Once there is no room to count further, odd and even still tell waiting from work.
        self._words[Word.PLACE] = word + marks if word & _MOST_WAITS < _MOST_WAITS - 2 else word ^ (marks & 1)
        self._words[Word.MOVED] = monotonic_ns()

    def gauge_device(self, allocated_bytes: Callable[[], int]) -> None:
        """Let the background thread ask for the memory of the device."""

        def read() -> None:
            self._words[Word.DEVICE] = allocated_bytes()

        with self._gauging:
            self._gauges.append(read)

    def gauge_links(self, counters: Callable[[], Sequence[LinkReading]]) -> None:
        """Let the background thread ask for the counters of at most `MOST_LINKS` links, and see how fast they are."""
        rates: dict[int, deque[float]] = {}
        before: dict[int, tuple[int, int]] = {}

        def read() -> None:
            now = monotonic_ns()
            for number, link in enumerate(counters()[:MOST_LINKS]):
                sent, at_ns = before.get(link.peer, (link.sent_bytes, now - 1))
                kept = rates.setdefault(link.peer, deque(maxlen=PEAK_TICKS))
                kept.append((link.sent_bytes - sent) * 8e9 / (now - at_ns))
                before[link.peer] = link.sent_bytes, now
                values = (*link[:-2], round(link.rtt_s * 1e9), max(0, round(max(kept))))
                for offset, value in enumerate(values):
                    self._words[FIRST_LINK + number * LINK + offset] = value
                self._words[Word.LINKS] = max(number + 1, self._words[Word.LINKS])

        with self._gauging:
            self._gauges.append(read)

    def drop_gauges(self) -> None:
        """Ask no more: what the gauges read is going away."""
        with self._gauging:
            self._gauges.clear()

    def _tick(self) -> None:
        ticks = 0
        while not self._closing.wait(TICK_S):
            ticks += 1
            self._words[Word.TICK] = ticks
            with self._gauging:
                self._gauges[:] = [read for read in self._gauges if _succeeds(read)]

    def close(self) -> None:
        """Stop ticking; the record stays as it is, for the agent to read how it ended."""
        self._closing.set()
        self._thread.join()


def _succeeds(read: Callable[[], None]) -> bool:
    """Read a gauge; one that fails, because what it read has gone, must not end the ticks."""
    try:
        read()
    except (RuntimeError, OSError, ValueError):
        return False
    return True


class PlaceReader:
    """A host's page, as its agent reads it."""

    def __init__(self, path: Path) -> None:
        """Open a page that `make_page` made.

        Raises:
            ValueError: there is none, or it is not this user's alone.
        """
        self._words = _map_page(path)

    def __len__(self) -> int:
        """Records of the page."""
        return self._words[Header.RANKS]

    def read(self, local_rank: int) -> Reading | None:
        """What the record of a local rank says; None if nobody has written to it yet."""
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
            place=place_of(values[Word.PLACE]),
            moved_ns=values[Word.MOVED],
            num_microbatches=values[Word.KIND],
            tick=values[Word.TICK],
            busy_ns=values[Word.BUSY],
            measured_steps=values[Word.MEASURED],
            began_ns=values[Word.BEGAN],
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
