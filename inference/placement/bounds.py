"""Lower bounds for placement, vectorised over bubble patterns: times before which work cannot end."""

from __future__ import annotations

import numpy as np

from weft.inference.placement.bubble_pattern import BubblePattern

MAX_ROWS = 1024
"""Rows of a table: evaluating this many takes about twice as long as one."""
_STEPS = 512
"""Number of parts that a period is divided into."""
_CELL_BITS = 11
_CELLS = 1 << _CELL_BITS
"""Number of parts that the capacity is divided into. Ranks of one stage often end a bubble in the same part."""
_NEVER_S = 2.0**40
"""Position of a row without a candidate."""
_SLACK_S = 1e-9
"""Positions are reduced by this, so that rounding cannot make bounds too high."""


class PlacementBounds:
    """A table with one row for each of up to `MAX_ROWS` patterns.

    Positions are those of `BubblePattern.position`, relative to the current cycle. A candidate's position is at least
    its previous position, and at least the position of the current time. Work advances it. Within a step of the table
    the position is constant, then grows with time, then is constant. This is exact unless several bubbles begin or end
    in that step. Within a cell time grows with the position, so bounds are exact except for cells in which a bubble
    ends, however many periods ahead.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._cycle = 0.0
        """The cycle that positions are relative to; the one before the current."""
        self._spare: list[int] = []
        self._position_s = np.empty(0)
        self._capacity_s = np.empty(0)
        self._cells_per_s = np.empty(0)
        """Cells per second of work."""
        self._passed_s = np.empty((_STEPS, 0))
        """Positions of the bubbles at equal steps through the current period."""
        self._growth_s = np.empty((_STEPS, 0))
        """Growth of the positions until the next step."""
        self._pause_s = np.empty((_STEPS, 0))
        """Maximum time for which positions are constant before they grow."""
        self._delay_s = np.empty((0, _CELLS), np.float32)
        """Time minus position at the begin of each cell."""
        self._idle_s = np.empty(0)
        """Time of a period that has no capacity for work, by which the delay grows in each period."""
        self._allot(16)

    @property
    def full(self) -> bool:
        """True if there is no free row."""
        return not self._spare and len(self._position_s) >= MAX_ROWS

    def add(self, pattern: BubblePattern) -> int:
        """Add a row for a pattern with nonzero capacity, and return the row's index."""
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
        self._delay_s[row] = np.nextafter(delay_s.astype(np.float32), np.float32(-np.inf))
        self._idle_s[row] = self._period_s - capacity_s
        return row

    def drop(self, row: int) -> None:
        """Free a row."""
        self._position_s[row], self._capacity_s[row] = _NEVER_S, 0.0
        self._spare.append(row)

    def at(self, row: int, position_s: float) -> None:
        """Set the minimum position of the row's candidate."""
        self._position_s[row] = position_s - self._cycle * self._capacity_s.item(row) - _SLACK_S

    def reach_s(self, now_s: float, work_s: float) -> tuple[np.ndarray, float]:
        """Return a lower bound for each row on when work that arrives now ends, and the time they are relative to.

        The array is valid until the next call.
        """
        cycle, phase_s = divmod(now_s, self._period_s)
        cycle -= 1  # keeps positions positive for any shift of patterns
        if cycle != self._cycle:
            self._position_s -= (cycle - self._cycle) * self._capacity_s
            self._cycle = cycle
        step, into = divmod(phase_s / self._period_s * _STEPS, 1)
        index = int(step)
        position_s, reach_s, delay_s, cells, entries, number = self._buffers
        number[()] = into * self._period_s / _STEPS
        np.subtract(number, self._pause_s[index], position_s)
        np.maximum(position_s, self._zeros, out=position_s)
        np.minimum(position_s, self._growth_s[index], out=position_s)
        position_s += self._passed_s[index]
        np.maximum(position_s, self._position_s, out=position_s)
        number[()] = work_s
        position_s += number
        np.multiply(position_s, self._cells_per_s, reach_s)
        cells[:] = reach_s
        np.bitwise_and(cells, _CELLS - 1, out=entries)
        entries += self._first_entry
        self._delay_s.take(entries, out=delay_s, mode="clip")
        cells >>= _CELL_BITS
        reach_s[:] = cells
        reach_s *= self._idle_s
        reach_s += delay_s
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
        self._delay_s = np.append(self._delay_s, np.zeros((more, _CELLS), np.float32), axis=0)
        self._idle_s = np.append(self._idle_s, np.zeros(more))
        self._first_entry = np.arange(size) * _CELLS
        # As an array: numpy.maximum of an array and a scalar takes twice as long.
        self._zeros = np.zeros(size)
        floats, singles, wholes = np.empty((2, size)), np.empty(size, np.float32), np.empty((2, size), np.int64)
        # The last is zero-dimensional: adding it takes half as long as adding a Python scalar.
        self._buffers = (*floats, singles, *wholes, np.array(0.0))
