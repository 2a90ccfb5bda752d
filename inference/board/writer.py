"""The writer of a bubble board, used by the training engine to publish when this rank is idle.

The writer never waits for readers. A mark is two stores to shared memory; readers are woken when a
bubble opens that is long enough to be useful.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

from weft.conf.host.processes import own_identity
from weft.conf.host.shared_words import WORD_BYTES, make_words, publish
from weft.conf.host.threads import Thread
from weft.inference.board.futex import Futex
from weft.inference.board.layout import (
    HEADER,
    MAGIC,
    ROW_HEADER,
    ROWS,
    VERSION,
    Header,
    RowHeader,
    board_path,
    num_words,
    row_at,
)

logger = logging.getLogger(__name__)

__all__ = ["HEARTBEAT_S", "BoardWriter", "board_path"]

HEARTBEAT_S = 0.1
"""Seconds between heartbeats."""
WAKING_GAP_NS = 1_000_000
"""Bubbles that were shorter than this in the previous step do not wake readers."""


class BoardWriter:
    """A rank's board. The calls of a step are `begin`, then alternating `busy` and `idle`.

    Calling `busy` while busy or `idle` while idle has no effect, so marks may be nested.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        plan: Sequence[tuple[float, float]],
        max_edges: int,
        steps_before: int = 0,
        beats: bool = True,
    ) -> None:
        """Publish a new board, replacing an older one.

        Args:
            path: the file. See `board_path`.
            plan: predicted work of a step: (start, end) in seconds from its begin, in order.
            max_edges: maximum number of marks per step; later marks are dropped, and bubbles after them are not
                predicted.
            steps_before: number of steps that are not recorded.
            beats: False leaves heartbeats to the caller. See `beat`.

        Raises:
            OSError: shared memory or futexes are not available.
            ValueError: the folder is not private to this user.
        """
        self.path = path
        max_edges = max(max_edges, 2 * len(plan) + 1)
        self._num_words = num_words(ROWS, max_edges)
        self._map()
        words = self._words
        words[Header.ROWS], words[Header.EDGES], words[Header.RANK] = ROWS, max_edges, rank
        words[Header.PID], words[Header.STARTED] = own_identity()
        words[Header.HEARTBEAT] = monotonic_ns()
        self._write_plan(plan)
        words[Header.VERSION], words[Header.MAGIC] = VERSION, MAGIC
        self._max_edges = max_edges
        self._step, self._replans = steps_before, 0
        self._row = row_at(0, ROWS, max_edges)
        self._count = 0
        self._gaps_before: list[int] = []
        self._zeros = memoryview(bytes(max_edges * WORD_BYTES)).cast("Q")
        self._closing = threading.Event()
        self._file_lost = False
        publish(path)
        if beats:
            Thread(self._beat_until_closed, name="weft-board").start()

    def _map(self) -> None:
        """Map a new, unpublished file."""
        self._memory = make_words(self.path, self._num_words)
        self._words = memoryview(self._memory).cast("Q")
        self._bell = Futex(memoryview(self._memory), Header.BELL * WORD_BYTES)

    def _restore(self) -> None:
        """Publish the board in a new file, because the old one was removed. Readers map the new file by themselves."""
        self._file_lost = False
        before = self._words
        try:
            self._map()
            self._words[:] = before
            publish(self.path)
        except (OSError, ValueError) as error:  # training goes on without a board
            logger.warning("%s was removed, and cannot be made again: %s", self.path, error)

    def replan(self, plan: Sequence[tuple[float, float]]) -> None:
        """Publish the predicted work of another schedule, between two steps. Earlier steps predict nothing any more."""
        self._write_plan(plan)
        self._replans += 1

    def _write_plan(self, plan: Sequence[tuple[float, float]]) -> None:
        words = self._words
        edges = [0, *(round(time_s * 1e9) for work in plan for time_s in work)]
        planned = min(len(edges) - 1, words[Header.EDGES]) if plan else 0  # the last work ends with the step
        for index, edge in enumerate(edges[:planned]):
            words[HEADER + index] = edge
        words[Header.PLANNED] = planned

    def begin(self, kind: int, at_ns: int | None = None) -> None:
        """Mark the beginning of a step. The rank is idle until the first `busy`.

        Args:
            kind: steps of the same kind have similar timing, such as those with as many micro-batches.
            at_ns: time by `time.monotonic_ns`; None is now.
        """
        if self._file_lost:
            self._restore()
        now = monotonic_ns() if at_ns is None else at_ns
        words, before, count = self._words, self._row, self._count
        times = words[before + ROW_HEADER : before + ROW_HEADER + count].tolist()
        self._gaps_before = [later - earlier for earlier, later in zip(times[::2], times[1::2], strict=False)]
        self._step += 1
        self._row = row = row_at(self._step, ROWS, self._max_edges)
        words[row + RowHeader.GENERATION] += 1
        words[row + ROW_HEADER : row + ROW_HEADER + self._max_edges] = self._zeros
        words[row + ROW_HEADER] = now
        words[row + RowHeader.STEP], words[row + RowHeader.COUNT] = self._step, 1
        words[row + RowHeader.KIND] = kind + (self._replans << 32)
        words[row + RowHeader.GENERATION] += 1
        words[Header.STEP] = self._step
        self._count = 1
        self._wake()

    def busy(self, at_ns: int | None = None) -> None:
        """Mark that the rank starts to compute. ``at_ns`` is as in `begin`."""
        if self._count & 1:
            self._mark(at_ns)

    def idle(self, at_ns: int | None = None) -> None:
        """Mark that the rank is idle until the next `busy`. ``at_ns`` is as in `begin`."""
        if self._count and not self._count & 1:
            self._mark(at_ns)
            self._wake()

    def _mark(self, at_ns: int | None) -> None:
        count = self._count
        if count < self._max_edges:
            self._words[self._row + ROW_HEADER + count] = monotonic_ns() if at_ns is None else at_ns
            self._count = self._words[self._row + RowHeader.COUNT] = count + 1

    def _wake(self) -> None:
        gap = self._count // 2
        if gap >= len(self._gaps_before) or self._gaps_before[gap] >= WAKING_GAP_NS:
            self._bell.ring()

    def beat(self) -> None:
        """Record that the rank lives."""
        self._words[Header.HEARTBEAT] = monotonic_ns()
        self._file_lost = not self.path.exists()

    def _beat_until_closed(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            self.beat()

    def close(self) -> None:
        """Remove the board; readers see immediately that training has ended."""
        self._words[Header.PID] = 0
        self.remove()

    def remove(self) -> None:
        """Remove the board, without a sign that training has ended."""
        self._closing.set()
        self._bell.ring()
        self.path.unlink(missing_ok=True)
