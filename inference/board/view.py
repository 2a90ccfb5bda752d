"""A read-only view of one mapped board: consistent reads of its rows, and its writer's liveness.

A view stays bound to its file: threads keep using it even if the path is replaced meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.conf.host.processes import start_ticks
from weft.conf.host.shared_words import WORD_BYTES
from weft.inference.board.forecast import Forecast, forecast, planned
from weft.inference.board.futex import Futex
from weft.inference.board.layout import HEADER, ROW_HEADER, Header, RowHeader, map_board, row_at

SILENCE_S = 0.5
"""Seconds without a heartbeat after which a writer counts as dead."""
ATTEMPTS = 100
"""Retries of a seqlock read."""


@dataclass(frozen=True)
class Row:
    """A step that is recorded on a board.

    Attributes:
        kind: number of the step's kind. Steps of the same kind have similar timing.
        edges: times at which work starts or ends, in nanoseconds of CLOCK_MONOTONIC, at least one. See
            `weft.inference.board.layout`.
    """

    step: int
    kind: int
    edges: tuple[int, ...]


class BoardView:
    """A mapped board."""

    def __init__(self, path: Path) -> None:
        """Map the board at ``path``.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is not a board of this user. See `map_board`.
        """
        self.path = path
        memory, self.file = map_board(path)
        self._words = memoryview(memory).cast("Q")
        self.bell = Futex(memoryview(memory), Header.BELL * WORD_BYTES)
        self._num_rows, self._num_edges = self._words[Header.ROWS], self._words[Header.EDGES]
        self._forecast: tuple[int, Forecast] | None = None

    @property
    def writer(self) -> int:
        """The writer's process id, or 0 after training has ended."""
        return self._words[Header.PID]

    @property
    def rank(self) -> int:
        """The board's global rank."""
        return self._words[Header.RANK]

    @property
    def num_edges(self) -> int:
        """Most edges of a step."""
        return self._num_edges

    @property
    def plan(self) -> list[int]:
        """The predicted edges of a step, in nanoseconds from its begin."""
        return self._words[HEADER : HEADER + min(self._words[Header.PLANNED], self._num_edges)].tolist()

    @property
    def ended(self) -> bool:
        """True if the writer has closed the board, or its process is gone."""
        return not self.writer or start_ticks(self.writer) != self._words[Header.STARTED]

    def why_dead(self, now_s: float) -> str:
        """Return why the writer is not alive, or an empty string if it is."""
        words = self._words
        if not words[Header.PID]:
            return f"{self.path}: training has ended"
        row = row_at(words[Header.STEP], self._num_rows, self._num_edges) + ROW_HEADER
        count = min(words[row - ROW_HEADER + RowHeader.COUNT], self._num_edges)
        marked = words[row + max(count, 1) - 1]
        silent_s = now_s - max(words[Header.HEARTBEAT], marked) / 1e9
        if silent_s <= SILENCE_S:
            return ""
        if start_ticks(words[Header.PID]) != words[Header.STARTED]:
            return f"{self.path}: the trainer (process {words[Header.PID]}) is dead"
        return f"{self.path}: the trainer (process {words[Header.PID]}) has been silent for {silent_s:.1f} s"

    def running(self) -> Row | None:
        """Return the running step, or None before the first."""
        return self._row(self._words[Header.STEP])

    def rows(self) -> list[Row]:
        """Return the recorded steps, in order. The running one is last."""
        newest = self._words[Header.STEP]
        steps = range(max(1, newest - self._num_rows + 1), newest + 1)
        return [row for row in map(self._row, steps) if row is not None]

    def forecast(self, running: Row) -> Forecast:
        """Return the forecast from earlier steps of the same kind with as many edges as the latest of them.

        Without such steps it is the schedule's prediction.
        """
        known = self._forecast
        if known is None or known[0] != running.step:
            self._forecast = known = running.step, self._forecast_for(running)
        return known[1]

    def _row(self, step: int) -> Row | None:
        """Read a step's row consistently. Return None if it does not exist or was overwritten."""
        words, first = self._words, row_at(step, self._num_rows, self._num_edges)
        for _ in range(ATTEMPTS if step else 0):
            generation = words[first + RowHeader.GENERATION]
            count, kind, found = (
                words[first + RowHeader.COUNT],
                words[first + RowHeader.KIND],
                words[first + RowHeader.STEP],
            )
            edges = words[first + ROW_HEADER : first + ROW_HEADER + min(count, self._num_edges)].tolist()
            if generation & 1 or words[first + RowHeader.GENERATION] != generation:
                continue
            if found != step:
                return None
            # An edge may be counted before it is visible: this core may see stores in another order.
            if edges and all(edges):
                return Row(step, kind, tuple(edges))
        return None

    def _forecast_for(self, running: Row) -> Forecast:
        rows = self.rows()
        ended = [row for row in rows if row.step < running.step and row.kind == running.kind]
        alike = [row for row in ended if len(row.edges) == len(ended[-1].edges)]
        if not alike:
            return planned([edge / 1e9 for edge in self.plan])
        steps = [[(edge - row.edges[0]) / 1e9 for edge in row.edges] for row in alike]
        return forecast(steps, [row.edges[0] / 1e9 for row in rows])
