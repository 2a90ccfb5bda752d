"""A rank publishes its progress in its record on the host's page, with a mark per slot and ticks of a thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns

from weft.conf.host.processes import own_start
from weft.conf.host.threads import Thread
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.messages import LinkReading
from weft.engine.supervision.progress_page import (
    BEGUN,
    DONE,
    FIRST_LINK,
    HEADER,
    LINK,
    MOST_LINKS,
    MOST_STEP,
    MOST_WAITS,
    RECORD,
    STEP,
    Header,
    Word,
    map_page,
)
from weft.pipeline.action import COMPUTE, Op, Slot

TICK_S = 0.1
"""Seconds between ticks of a rank's background thread."""
PEAK_TICKS = 20
"""Number of recent ticks from which a link's peak speed is taken."""
_PLACE, _MOVED = int(Word.PLACE), int(Word.MOVED)


class ProgressWriter:
    """One rank's record. A background thread, which needs the interpreter's lock, increments its tick.

    `slot_begins` and `slot_ends` implement `weft.engine.observability.watcher.SlotObserver`.
    """

    def __init__(self, path: Path, *, local_rank: int, rank: int, attempt: int) -> None:
        """Take over the record of ``local_rank``, in the phase set-up.

        Args:
            rank: global rank.

        Raises:
            ValueError: there is no such page, or it has no record for this rank.
        """
        page = map_page(path)
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
        self._thread = Thread(self._tick, name="weft-place")
        self._thread.start()

    def begin_attempt(self, attempt: int, *, rank: int) -> None:
        """Reset the record, because the process takes part in another attempt, possibly as another rank."""
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
        """Begin a phase. After the first step this also changes the progress word."""
        self._words[Word.PHASE] = phase
        if self._words[Word.PLACE]:
            self._mark(2)
        self._words[Word.MOVED] = monotonic_ns()

    def measure_device(self) -> None:
        """Stop timing computations on the host. The device's times are added by `add_busy`."""
        self._own = frozenset()

    def keep(self, step: int) -> None:
        """Record that a memory checkpoint of ``step`` is complete on all hosts."""
        self._words[Word.KEPT] = step

    def add_busy(self, seconds: float) -> None:
        """Record the computation time of one step."""
        self._busy_ns += round(seconds * 1e9)
        self._words[Word.BUSY] = self._busy_ns
        self._words[Word.MEASURED] += 1

    def begin_step(self, step: int, num_microbatches: int) -> None:
        """Begin a step, counted from 1."""
        words = self._words
        words[Word.KIND] = num_microbatches
        if self._own and self._ended >= STEP:  # not the first step
            words[Word.BUSY] = self._busy_ns
            words[Word.MEASURED] += 1
        self._ended = words[Word.PLACE] = (step & MOST_STEP) * STEP
        words[Word.MOVED] = words[Word.BEGAN] = monotonic_ns()

    def slot_begins(self, slot: Slot) -> None:
        """Mark the beginning of the row's next slot."""
        words = self._words
        words[_PLACE] = self._ended | BEGUN
        words[_MOVED] = self._moved = monotonic_ns()

    def slot_ends(self, slot: Slot) -> None:
        """Mark the end of the slot."""
        words = self._words
        self._ended = words[_PLACE] = self._ended + DONE
        words[_MOVED] = now = monotonic_ns()
        if slot[0][0] in self._own:
            self._busy_ns += now - self._moved

    def begin_wait(self) -> None:
        """Mark that the rank waits for others. Waits may be nested, and the outermost counts."""
        self._depth += 1
        if self._depth == 1:
            self._mark(1)

    def end_wait(self) -> None:
        """End the wait that `begin_wait` announced."""
        self._depth -= 1
        if not self._depth:
            self._mark(1)

    def _mark(self, marks: int) -> None:
        word = self._words[Word.PLACE]
        # At the end of the counter's range, odd and even still distinguish waiting from work.
        self._words[Word.PLACE] = word + marks if word & MOST_WAITS < MOST_WAITS - 2 else word ^ (marks & 1)
        self._words[Word.MOVED] = monotonic_ns()

    def gauge_device(self, allocated_bytes: Callable[[], int]) -> None:
        """Let the background thread read the device's allocated memory."""

        def read() -> None:
            self._words[Word.DEVICE] = allocated_bytes()

        with self._gauging:
            self._gauges.append(read)

    def gauge_links(self, counters: Callable[[], Sequence[LinkReading]]) -> None:
        """Let the background thread read the counters of at most `MOST_LINKS` links, and measure their speed."""
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
        """Remove all gauges, because their sources are about to be closed."""
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
        """Stop the thread. The record stays on the page, so that the agent can read how the rank ended."""
        self._closing.set()
        self._thread.join()


def _succeeds(read: Callable[[], None]) -> bool:
    """Read a gauge. Return False if that failed because its source is closed, which must not end the ticks."""
    try:
        read()
    except (RuntimeError, OSError, ValueError):
        return False
    return True
