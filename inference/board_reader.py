"""The bubble board, as a prefill worker or the controller reads it."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from weft.inference.board_layout import (
    H_BELL,
    H_EDGES,
    H_HEARTBEAT,
    H_PID,
    H_PLANNED,
    H_RANK,
    H_ROWS,
    H_STARTED,
    H_STEP,
    HEADER,
    R_COUNT,
    R_GENERATION,
    R_KIND,
    R_STEP,
    ROW_HEADER,
    WORD_BYTES,
    map_board,
    row_at,
)
from weft.inference.forecast import Forecast, forecast, planned
from weft.inference.futex import Futex
from weft.inference.process_identity import start_ticks

SILENCE_S = 0.5
"""A writer that has given no sign of life for this long is taken for dead."""
LEAST_STEPS = 2
"""Measured steps without which no bubble is granted: a plan that was never tried closes nothing."""
ATTEMPTS = 100
"""Reads of a row that a writer is changing."""
SHORTEST_S = 0.001
"""Bubbles that are shorter are not foretold."""
REOPEN_S = 0.2
"""How often a board that is not there is looked for."""


@dataclass(frozen=True)
class Bubble:
    """Time in which a rank does not compute; seconds of CLOCK_MONOTONIC.

    Attributes:
        step: the training step it belongs to.
        index: its place in the step; 0 is before the first work.
        opens_s: when it opened.
        closes_s: the earliest time at which training is expected back.
    """

    step: int
    index: int
    opens_s: float
    closes_s: float


@dataclass(frozen=True)
class BoardState:
    """What a board says now.

    Attributes:
        now_s: CLOCK_MONOTONIC at the reading.
        alive: whether its writer lives; nothing may be granted if not.
        why_not: why it is not alive; empty if it is.
        step: training steps begun; 0 before the first.
        busy_since_s: since when the rank computes; 0.0 if it does not.
        bubble: the open bubble, if there is one that can be foretold, until it closes.
        bell: what `BoardReader.wait` goes by.
    """

    now_s: float
    alive: bool
    why_not: str
    step: int
    busy_since_s: float
    bubble: Bubble | None
    bell: int


@dataclass(frozen=True)
class _Row:
    step: int
    kind: int
    edges: tuple[int, ...]


class BoardReader:
    """Reads one rank's board; never blocks its writer, and outlives it.

    The file may come later than the reader, go, and be replaced by another run's.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the board at ``path``, once there is one."""
        self.path = Path(path)
        self._file: tuple[int, int] | None = None
        self._memory: mmap.mmap | None = None
        self._problem = "no board yet; has training begun, with inference.enabled=true?"
        self._forecast: tuple[int, Forecast] | None = None
        self._open()

    def state(self) -> BoardState:
        """Now: whether the writer lives, and the open bubble."""
        self._open()
        now_s = time.monotonic()
        bell = self._bell.read() if self._memory is not None else 0
        why_not = self._why_dead(now_s)
        row = None if why_not else self._row(self._words[H_STEP])
        if row is None:
            return BoardState(now_s, not why_not, why_not, 0, 0.0, None, bell)
        edge = len(row.edges) - 1
        at_s = row.edges[edge] / 1e9
        if edge & 1:
            return BoardState(now_s, True, "", row.step, at_s, None, bell)
        found = self._learn(row)
        begin_s = row.edges[0] / 1e9
        closes_s = found.closes_s(edge, at_s - begin_s) if found.num_steps >= LEAST_STEPS else None
        bubble = None
        if closes_s is not None and begin_s + closes_s > now_s:
            bubble = Bubble(row.step, edge // 2, at_s, begin_s + closes_s)
        return BoardState(now_s, True, "", row.step, 0.0, bubble, bell)

    def upcoming(self, horizon_s: float) -> list[tuple[float, float]]:
        """Bubbles expected in the next ``horizon_s``: (start, end) in seconds of CLOCK_MONOTONIC, in order.

        The open one comes first, from now on. Before the first measured step it is the
        schedule's own prediction; empty when the writer is dead or has not begun a step.
        """
        self._open()
        now_s = time.monotonic()
        row = None if self._why_dead(now_s) else self._row(self._words[H_STEP])
        if row is None:
            return []
        begin_s, at_s = row.edges[0] / 1e9, row.edges[-1] / 1e9
        found = self._learn(row).bubbles(
            len(row.edges) - 1, at_s - begin_s, now_s - begin_s, now_s + horizon_s - begin_s
        )
        return [(begin_s + start_s, begin_s + end_s) for start_s, end_s in found if end_s - start_s >= SHORTEST_S]

    def work(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """The rank's work in the remembered steps that have ended: (step, [(start, end), ...]).

        Seconds of CLOCK_MONOTONIC. The last work of a step lasts until the next step begins.
        """
        if self._memory is None:
            return []
        rows = {row.step: row for row in self._rows()}
        found = []
        for step, row in sorted(rows.items()):
            if step + 1 in rows:
                times = [edge / 1e9 for edge in row.edges[1:]]
                if len(times) & 1:
                    times.append(rows[step + 1].edges[0] / 1e9)
                found.append((step, list(zip(times[::2], times[1::2], strict=True))))
        return found

    def wait(self, state: BoardState, timeout_s: float) -> None:
        """Sleep until the board has news since ``state`` was read, at most ``timeout_s``."""
        if self._memory is None:
            time.sleep(min(timeout_s, REOPEN_S))
        else:
            self._bell.wait(state.bell, timeout_s)

    @property
    def writer(self) -> int | None:
        """The process id of its writer; None while there is no board."""
        return None if self._memory is None else self._words[H_PID]

    @property
    def rank(self) -> int | None:
        """The global rank whose board it is; None while there is no board."""
        return None if self._memory is None else self._words[H_RANK]

    def _open(self) -> None:
        """Follow the name: to a board that has come, or to another run's."""
        try:
            found = os.stat(self.path)
        except OSError:
            if self._memory is not None:
                self._memory, self._file = None, None
                self._problem = f"{self.path}: the board is gone; training has ended, or the file was removed"
            return
        if (found.st_dev, found.st_ino) == self._file:
            return
        self._memory, self._forecast = None, None
        try:
            self._memory, self._file = map_board(self.path)
        except (OSError, ValueError) as error:
            self._problem, self._file = str(error), (found.st_dev, found.st_ino)
            return
        self._words = memoryview(self._memory).cast("Q")
        self._bell = Futex(memoryview(self._memory), H_BELL * WORD_BYTES)
        self._num_rows, self._num_edges = self._words[H_ROWS], self._words[H_EDGES]

    def _why_dead(self, now_s: float) -> str:
        if self._memory is None:
            return self._problem
        words = self._words
        if not words[H_PID]:
            return f"{self.path}: training has ended"
        row = row_at(words[H_STEP], self._num_rows, self._num_edges) + ROW_HEADER
        marked = words[row + max(words[row - ROW_HEADER + R_COUNT], 1) - 1]
        silent_s = now_s - max(words[H_HEARTBEAT], marked) / 1e9
        if silent_s <= SILENCE_S:
            return ""
        if start_ticks(words[H_PID]) != words[H_STARTED]:
            return f"{self.path}: the trainer (process {words[H_PID]}) is dead"
        return f"{self.path}: the trainer (process {words[H_PID]}) has been silent for {silent_s:.1f} s"

    def _row(self, step: int) -> _Row | None:
        """A step's row, read whole; None before the first, or if another step has taken its place."""
        words, first = self._words, row_at(step, self._num_rows, self._num_edges)
        for _ in range(ATTEMPTS if step else 0):
            generation = words[first + R_GENERATION]
            count, kind, found = words[first + R_COUNT], words[first + R_KIND], words[first + R_STEP]
            edges = words[first + ROW_HEADER : first + ROW_HEADER + min(count, self._num_edges)].tolist()
            if generation & 1 or words[first + R_GENERATION] != generation:
                continue
            if found != step:
                return None
            # An edge that is not there yet although it is counted: another core saw the stores
            # in another order.
            if edges and all(edges):
                return _Row(step, kind, tuple(edges))
        return None

    def _rows(self) -> list[_Row]:
        newest = self._words[H_STEP]
        steps = range(max(1, newest - self._num_rows + 1), newest + 1)
        return [row for row in map(self._row, steps) if row is not None]

    def _learn(self, running: _Row) -> Forecast:
        """From the steps before this one that are of its kind, and like the last of them."""
        if self._forecast is None or self._forecast[0] != running.step:
            self._forecast = running.step, self._forecast_for(running)
        return self._forecast[1]

    def _forecast_for(self, running: _Row) -> Forecast:
        rows = self._rows()
        ended = [row for row in rows if row.step < running.step and row.kind == running.kind]
        alike = [row for row in ended if len(row.edges) == len(ended[-1].edges)]
        if not alike:
            count = self._words[H_PLANNED]
            return planned([edge / 1e9 for edge in self._words[HEADER : HEADER + count].tolist()])
        steps = [[(edge - row.edges[0]) / 1e9 for edge in row.edges] for row in alike]
        return forecast(steps, [row.edges[0] / 1e9 for row in rows])
