"""The reader of a bubble board, for prefill workers and the controller."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import inf
from pathlib import Path

from weft.inference.board.view import BoardView, Row

MIN_STEPS = 2
"""Number of measured steps required before bubbles are granted: a plan is not a measurement."""
SHORTEST_S = 0.001
"""Shorter bubbles are not predicted."""
REOPEN_S = 0.2
"""Polling interval for a missing board."""


@dataclass(frozen=True)
class Bubble:
    """A bubble of a rank; seconds of CLOCK_MONOTONIC.

    Attributes:
        index: number in the step; bubble 0 precedes the first work.
        closes_s: the earliest time at which training is predicted to continue.
    """

    step: int
    index: int
    opens_s: float
    closes_s: float


@dataclass(frozen=True)
class BoardState:
    """The state of a board.

    Attributes:
        now_s: CLOCK_MONOTONIC when it was read.
        alive: True if its writer is alive. Otherwise no tokens may be granted.
        why_not: why it is not alive, or empty.
        step: the number of training steps begun.
        busy_since_s: time at which the rank began to compute, or 0.0 if it is idle.
        bubble: the open bubble, or None if there is none or its end cannot be predicted.
        bell: the futex's value, for `BoardReader.wait`.
    """

    now_s: float
    alive: bool
    why_not: str
    step: int
    busy_since_s: float
    bubble: Bubble | None
    bell: int


class BoardReader:
    """Reads one rank's board without ever blocking its writer. Thread-safe.

    The file may appear later, disappear, and be replaced by another run's.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # The board at the path when it was last checked. Immutable: threads replace it atomically.
        self._seen: _Seen = _Seen(None, None, "no board yet; has training begun, with inference.enabled=true?")
        self._look()

    def state(self) -> BoardState:
        """Return the current state."""
        seen = self._look()
        now_s = time.monotonic()
        bell = seen.view.bell.read() if seen.view is not None else 0
        why_not = seen.why_dead(now_s)
        row = seen.view.running() if seen.view is not None and not why_not else None
        if seen.view is None or row is None:
            return BoardState(now_s, not why_not, why_not, 0, 0.0, None, bell)
        edge = len(row.edges) - 1
        at_s = row.edges[edge] / 1e9
        if edge & 1:
            return BoardState(now_s, True, "", row.step, at_s, None, bell)
        found = seen.view.forecast(row)
        begin_s = row.edges[0] / 1e9
        closes_s = found.closes_s(edge, at_s - begin_s) if found.num_steps >= MIN_STEPS else None
        bubble = None
        if closes_s is not None and begin_s + closes_s > now_s:
            bubble = Bubble(row.step, edge // 2, at_s, begin_s + closes_s)
        return BoardState(now_s, True, "", row.step, 0.0, bubble, bell)

    def upcoming(self, horizon_s: float, *, is_cautious: bool = False) -> list[tuple[float, float]]:
        """Return the predicted bubbles within ``horizon_s`` in order: (start, end) in seconds of CLOCK_MONOTONIC.

        An open bubble is the first one, and starts now. Before the first measured step the schedule's prediction is
        used. The list is empty if the writer is dead or has not begun a step.

        Args:
            is_cautious: True returns each bubble as short as it was in any recorded step.
        """
        seen = self._look()
        now_s = time.monotonic()
        row = seen.view.running() if seen.view is not None and not seen.why_dead(now_s) else None
        if seen.view is None or row is None:
            return []
        begin_s, at_s = row.edges[0] / 1e9, row.edges[-1] / 1e9
        found = seen.view.forecast(row).bubbles(
            len(row.edges) - 1,
            at_s - begin_s,
            now_s - begin_s,
            now_s + horizon_s - begin_s,
            is_cautious=is_cautious,
        )
        return [(begin_s + start_s, begin_s + end_s) for start_s, end_s in found if end_s - start_s >= SHORTEST_S]

    def work(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """Return the rank's work in the recorded, completed steps: (step, [(start, end), ...]).

        Times are seconds of CLOCK_MONOTONIC. The last work of a step lasts until the next step begins.
        """
        rows = self._rows()
        return [(row.step, list(_work_of(row, after))) for row, after in pairwise(rows) if after.step == row.step + 1]

    def busy_from(self, begin_s: float, end_s: float) -> float | None:
        """Return the first time between ``begin_s`` and ``end_s`` at which the rank computed, or None if it did not.

        All recorded steps are considered, including the running one.
        """
        rows = self._rows()
        for row, after in zip_longest(rows, rows[1:]):
            for start_s, stop_s in _work_of(row, after):
                if start_s < end_s and stop_s > begin_s:
                    return max(start_s, begin_s)
        return None

    def wait(self, state: BoardState, timeout_s: float) -> None:
        """Block until the board has changed since ``state`` was read, for at most ``timeout_s``."""
        view = self._seen.view
        if view is None:
            time.sleep(min(timeout_s, REOPEN_S))
        else:
            view.bell.wait(state.bell, timeout_s)

    @property
    def view(self) -> BoardView | None:
        """The board that is at the path now, or None without one."""
        return self._look().view

    @property
    def ended(self) -> bool:
        """True if the training that wrote the last board has ended, and no other has begun."""
        return self._look().ended

    @property
    def writer(self) -> int | None:
        """The writer's process id, or None without a board."""
        view = self._seen.view
        return None if view is None else view.writer

    @property
    def rank(self) -> int | None:
        """The board's global rank, or None without a board."""
        view = self._seen.view
        return None if view is None else view.rank

    def _rows(self) -> list[Row]:
        view = self._seen.view
        return [] if view is None else view.rows()

    def _look(self) -> _Seen:
        """Return the board at the path, after checking whether the path names a new board or another run's."""
        seen = self._seen
        try:
            stat = os.stat(self.path)
        except OSError:
            if seen.file is not None:
                why = f"{self.path}: the board is gone; training has ended, or the file was removed"
                self._seen = seen = _Seen(None, None, why, seen.ended)
            return seen
        file = stat.st_dev, stat.st_ino
        if file != seen.file:
            try:
                view = BoardView(self.path)
                seen = _Seen(view.file, view, "")
            except (OSError, ValueError) as error:
                seen = _Seen(file, None, str(error))
            self._seen = seen
        return seen


@dataclass(frozen=True)
class _Seen:
    """A file at the path: its board or the problem with it, and whether an earlier board was closed."""

    file: tuple[int, int] | None
    view: BoardView | None
    problem: str
    was_closed: bool = False

    @property
    def ended(self) -> bool:
        return self.was_closed if self.view is None else self.view.ended

    def why_dead(self, now_s: float) -> str:
        return self.problem if self.view is None else self.view.why_dead(now_s)


def _work_of(row: Row, after: Row | None) -> Iterator[tuple[float, float]]:
    """Yield the work of a step as (start, end) in seconds. Unfinished work ends at infinity."""
    times = [edge / 1e9 for edge in row.edges[1:]]
    if len(times) & 1:
        times.append(after.edges[0] / 1e9 if after is not None else inf)
    return zip(times[::2], times[1::2], strict=True)
