"""The bubble board, as a prefill worker or the controller reads it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import inf
from pathlib import Path

from weft.inference.board.view import BoardView, Row

LEAST_STEPS = 2
"""Measured steps without which no bubble is granted: a plan that was never tried closes nothing."""
SHORTEST_S = 0.001
"""Bubbles that are shorter are not predicted."""
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
        bubble: the open bubble, if there is one that can be predicted, until it closes.
        bell: what `BoardReader.wait` goes by.
    """

    now_s: float
    alive: bool
    why_not: str
    step: int
    busy_since_s: float
    bubble: Bubble | None
    bell: int


class BoardReader:
    """Reads one rank's board; never blocks its writer, and outlives it. Safe for threads.

    The file may come later than the reader, go, and be replaced by another run's.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the board at ``path``, once there is one."""
        self.path = Path(path)
        # What the name stood for when it was last looked up. Readers on several threads replace it
        # as a whole and never change it.
        self._seen: _Seen = _Seen(None, None, "no board yet; has training begun, with inference.enabled=true?")
        self._look()

    def state(self) -> BoardState:
        """Now: whether the writer lives, and the open bubble."""
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
        found = seen.view.learn(row)
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
        seen = self._look()
        now_s = time.monotonic()
        row = seen.view.running() if seen.view is not None and not seen.why_dead(now_s) else None
        if seen.view is None or row is None:
            return []
        begin_s, at_s = row.edges[0] / 1e9, row.edges[-1] / 1e9
        found = seen.view.learn(row).bubbles(
            len(row.edges) - 1, at_s - begin_s, now_s - begin_s, now_s + horizon_s - begin_s
        )
        return [(begin_s + start_s, begin_s + end_s) for start_s, end_s in found if end_s - start_s >= SHORTEST_S]

    def work(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """The rank's work in the remembered steps that have ended: (step, [(start, end), ...]).

        Seconds of CLOCK_MONOTONIC. The last work of a step lasts until the next step begins.
        """
        rows = self._rows()
        return [(row.step, list(_work_of(row, after))) for row, after in pairwise(rows) if after.step == row.step + 1]

    def busy_from(self, begin_s: float, end_s: float) -> float | None:
        """The first moment from ``begin_s`` to ``end_s`` at which the rank computed; None if it never did.

        As far as the steps are remembered, whether they have ended or not.
        """
        rows = self._rows()
        for row, after in zip_longest(rows, rows[1:]):
            for start_s, stop_s in _work_of(row, after):
                if start_s < end_s and stop_s > begin_s:
                    return max(start_s, begin_s)
        return None

    def wait(self, state: BoardState, timeout_s: float) -> None:
        """Sleep until the board has news since ``state`` was read, at most ``timeout_s``."""
        view = self._seen.view
        if view is None:
            time.sleep(min(timeout_s, REOPEN_S))
        else:
            view.bell.wait(state.bell, timeout_s)

    @property
    def writer(self) -> int | None:
        """The process id of its writer; None while there is no board."""
        view = self._seen.view
        return None if view is None else view.writer

    @property
    def rank(self) -> int | None:
        """The global rank whose board it is; None while there is no board."""
        view = self._seen.view
        return None if view is None else view.rank

    def _rows(self) -> list[Row]:
        view = self._seen.view
        return [] if view is None else view.rows()

    def _look(self) -> _Seen:
        """Follow the name: to a board that has come, or to another run's."""
        seen = self._seen
        try:
            found = os.stat(self.path)
        except OSError:
            if seen.file is not None:
                why = f"{self.path}: the board is gone; training has ended, or the file was removed"
                self._seen = seen = _Seen(None, None, why)
            return seen
        file = found.st_dev, found.st_ino
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
    """What a name stood for: the file, its board if it is one, and what is wrong if not."""

    file: tuple[int, int] | None
    view: BoardView | None
    problem: str

    def why_dead(self, now_s: float) -> str:
        return self.problem if self.view is None else self.view.why_dead(now_s)


def _work_of(row: Row, after: Row | None) -> Iterator[tuple[float, float]]:
    """The work of a step as (start, end) in seconds; what has no end yet lasts for ever."""
    times = [edge / 1e9 for edge in row.edges[1:]]
    if len(times) & 1:
        times.append(after.edges[0] / 1e9 if after is not None else inf)
    return zip(times[::2], times[1::2], strict=True)
