"""Bounds of the placement: for many bubble patterns at once, a time before which work cannot end."""

from __future__ import annotations

import numpy as np

from weft.inference.placement.bubble_pattern import BubblePattern

MOST_ROWS = 1024
"""Rows of a table: as many as can be looked at in about twice the time of one."""
_STEPS = 512
"""Parts of a period in the tables."""
_CELLS = 2048
"""Parts of its capacity. Ranks of one place in the pipeline often come to the end of a bubble in the same part."""
_ROUNDS = 4
"""Periods from the one before the present on, in which bounds are exact; what ends later is only
known to end later than those."""
_NEVER_S = 2.0**40
"""Position of a row without a candidate."""
_SLACK_S = 1e-9
"""What positions stay below the truth, so that rounding cannot put them above it."""


class PlacementBounds:
    """A row for each of up to `MOST_ROWS` patterns; positions are `BubblePattern.position`'s, in this cycle.

    A candidate's position is at least where it last was, and at least where the bubbles are
    by now; work moves it on. Within a step a position stays, then grows with time, then stays:
    that is exact unless more than one bubble begins or ends there. Within a cell time grows with
    the position, so that bounds are exact but for cells in which a bubble ends.
    """

    def __init__(self, period_s: float) -> None:
        """No rows yet; all patterns repeat after ``period_s``."""
        self._period_s = period_s
        self._cycle = 0.0
        """The period that positions are counted from; the one before the present."""
        self._spare: list[int] = []
        self._position_s = np.empty(0)
        self._capacity_s = np.empty(0)
        self._cells_per_s = np.empty(0)
        """Cells per second of work."""
        self._passed_s = np.empty((_STEPS, 0))
        """Positions of the bubbles at equal steps through the present period."""
        self._growth_s = np.empty((_STEPS, 0))
        """How much they grow until the next step."""
        self._pause_s = np.empty((_STEPS, 0))
        """For how long they stay before that, at most."""
        self._delay_s = np.empty((0, _ROUNDS * _CELLS), np.float32)
        """How much later than its position a cell of the capacity begins, round after round."""
        self._allot(16)

    @property
    def full(self) -> bool:
        """Whether it has no row to spare."""
        return not self._spare and len(self._position_s) >= MOST_ROWS

    def add(self, pattern: BubblePattern) -> int:
        """A row for a pattern with some capacity; returns its index."""
        if not self._spare:
            self._allot(2 * len(self._position_s))
        row = self._spare.pop()
        capacity_s, step_s = pattern.capacity_s, self._period_s / _STEPS
        self._capacity_s[row] = capacity_s
        self._cells_per_s[row] = _CELLS / capacity_s
        times_s = np.arange(_STEPS + 1) * step_s
        passed_s = pattern.positions(times_s)
        growth_s = np.diff(passed_s)
        at_once = pattern.positions(times_s[:-1] + growth_s) >= passed_s[1:] - _SLACK_S / 2
        self._passed_s[:, row] = passed_s[:-1] + (capacity_s - _SLACK_S)
        self._growth_s[:, row] = growth_s
        self._pause_s[:, row] = np.where(at_once, 0.0, step_s - growth_s)
        positions_s = np.arange(_CELLS) / _CELLS * capacity_s
        delay_s = pattern.times(positions_s) - positions_s
        # Each period that passes whole adds what of it is no room for work.
        rounds = np.arange(_ROUNDS)[:, None] * (self._period_s - capacity_s)
        self._delay_s[row] = np.nextafter((delay_s + rounds).astype(np.float32), np.float32(-np.inf)).ravel()
        return row

    def drop(self, row: int) -> None:
        """The row has no candidate, and is free for another pattern."""
        self._position_s[row], self._capacity_s[row] = _NEVER_S, 0.0
        self._spare.append(row)

    def at(self, row: int, position_s: float) -> None:
        """The row's candidate begins at this position or later."""
        self._position_s[row] = position_s - self._cycle * self._capacity_s.item(row) - _SLACK_S

    def reach_s(self, now_s: float, work_s: float) -> tuple[np.ndarray, float]:
        """Per row, a time before which work that arrives now cannot end, and the time that it counts from.

        The array is valid until the next call.
        """
        cycle, phase_s = divmod(now_s, self._period_s)
        cycle -= 1  # keeps positions above 0, however the patterns are shifted
        if cycle != self._cycle:
            self._position_s -= (cycle - self._cycle) * self._capacity_s
            self._cycle = cycle
        step, into = divmod(phase_s / self._period_s * _STEPS, 1)
        index = int(step)
        position_s, reach_s, delay_s, cell, number = self._buffers
        number[()] = into * self._period_s / _STEPS
        np.subtract(number, self._pause_s[index], position_s)
        np.maximum(position_s, self._zeros, out=position_s)
        np.minimum(position_s, self._growth_s[index], out=position_s)
        position_s += self._passed_s[index]
        np.maximum(position_s, self._position_s, out=position_s)
        number[()] = work_s
        position_s += number
        np.multiply(position_s, self._cells_per_s, reach_s)
        np.minimum(reach_s, self._last_cells, out=reach_s)
        reach_s += self._first_cell
        cell[:] = reach_s
        self._delay_s.take(cell, out=delay_s, mode="clip")
        reach_s[:] = delay_s
        reach_s += position_s
        return reach_s, cycle * self._period_s

    def _allot(self, size: int) -> None:
        more = size - len(self._position_s)
        self._spare.extend(range(size - 1, size - more - 1, -1))
        self._position_s = np.append(self._position_s, np.full(more, _NEVER_S))
        self._capacity_s = np.append(self._capacity_s, np.zeros(more))
        self._cells_per_s = np.append(self._cells_per_s, np.ones(more))
        more_steps = np.zeros((_STEPS, more))
        self._passed_s = np.append(self._passed_s, more_steps, axis=1)
        self._growth_s = np.append(self._growth_s, more_steps, axis=1)
        self._pause_s = np.append(self._pause_s, more_steps, axis=1)
        width = self._delay_s.shape[1]
        self._delay_s = np.append(self._delay_s, np.zeros((more, width), np.float32), axis=0)
        self._first_cell = np.arange(size) * float(width)
        # As arrays: numpy takes twice as long over the greater of an array and a number.
        self._zeros, self._last_cells = np.zeros(size), np.full(size, width - 1.0)
        floats, singles, wholes = np.empty((2, size)), np.empty(size, np.float32), np.empty(size, np.int64)
        # The last of no axes: numpy takes half as long over a sum with such an array as with a number.
        self._buffers = (*floats, singles, wholes, np.array(0.0))
