"""A worker's bubbles as a periodic pattern of capacity for work."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

import numpy as np


class BubblePattern:
    """The periodic times in which a worker may run, and the end of work on it.

    Work is measured in seconds and divisible (chunked prefill). It takes ``overhead_s`` more for each bubble that it
    runs in. Patterns compare equal if all their methods return equal results.

    Raises:
        ValueError: the bubbles are not sorted, overlap, or exceed the period.
    """

    __slots__ = ("_done", "_ends", "_key", "_leaves", "_origin_s", "_overhead_s", "_period_s", "_starts", "_total_s")

    def __init__(
        self,
        bubbles: Sequence[tuple[float, float]],
        period_s: float,
        *,
        origin_s: float = 0.0,
        overhead_s: float = 0.0,
        guard_s: float = 0.0,
    ) -> None:
        """Create a pattern from ``bubbles``: (start, end) in seconds from the step's begin.

        Args:
            origin_s: begin of some step.
            overhead_s: seconds that work loses in each bubble. See `PromptWork.overhead_s`.
            guard_s: seconds kept free at the end of each bubble.
        """
        edges = [edge for bubble in bubbles for edge in bubble]
        if not 0 < period_s < inf or edges != sorted(edges) or (edges and (edges[0] < 0 or edges[-1] > period_s)):
            raise ValueError(f"bubbles {list(bubbles)}: not in order within a step of {period_s:g} s")
        rows = list(bubbles)
        if len(rows) > 1 and rows[0][0] == 0.0 and rows[-1][1] == period_s:
            # The last bubble continues in the next step: start the period after it.
            shift_s = rows[0][1]
            rows = [(start - shift_s, end - shift_s) for start, end in rows[1:-1]] + [(rows[-1][0] - shift_s, period_s)]
            origin_s += shift_s
        rows = [(start, end - guard_s) for start, end in rows if end - guard_s - start > overhead_s]
        self._fill([(start, start, end - start) for start, end in rows], period_s, origin_s, overhead_s)

    @classmethod
    def of_slots(
        cls, slots: Sequence[tuple[float, float, float]], period_s: float, *, origin_s: float, overhead_s: float
    ) -> BubblePattern:
        """Create the pattern of a pipeline, whose last stage computes later than the first.

        Args:
            slots: (entry, start of the same work in the last stage, length) in order of both, less than a period apart.
        """
        pattern = cls.__new__(cls)
        shift_s = slots[0][0] if slots else 0.0
        rows = [(enters - shift_s, leaves - shift_s, length) for enters, leaves, length in slots]
        pattern._fill(rows, period_s, origin_s + shift_s, overhead_s)
        return pattern

    def _fill(
        self, rows: Sequence[tuple[float, float, float]], period_s: float, origin_s: float, overhead_s: float
    ) -> None:
        self._starts = [enters for enters, _, _ in rows]
        self._ends = [enters + length for enters, _, length in rows]
        self._leaves = [leaves for _, leaves, _ in rows]
        self._done = [0.0, *accumulate(length - overhead_s for _, _, length in rows)]
        self._total_s = self._done[-1]
        self._period_s = period_s
        self._origin_s = origin_s % period_s
        self._overhead_s = overhead_s
        self._key = (tuple(rows), period_s, self._origin_s, overhead_s)

    @property
    def capacity_s(self) -> float:
        """Seconds of work that fit into a period."""
        return self._total_s

    @property
    def open_s(self) -> float:
        """Seconds of a period in which work can run, including overheads."""
        return sum(self._ends) - sum(self._starts)

    @property
    def overhead_s(self) -> float:
        """Seconds of overhead per bubble."""
        return self._overhead_s

    @property
    def least_delay_s(self) -> float:
        """Least seconds from the end of work in the first stage to its end in the last one, or 0 for one stage."""
        return min((leaves - enters for enters, leaves in zip(self._starts, self._leaves, strict=True)), default=0.0)

    @property
    def period_s(self) -> float:
        """The period in seconds."""
        return self._period_s

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BubblePattern) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def position(self, time_s: float) -> float:
        """Return the cumulative capacity of the bubbles from the origin until ``time_s``.

        Work that begins at ``time_s`` or later ends at a later position. Positions grow by `capacity_s` per period."""
        cycle, phase_s = divmod(time_s - self._origin_s, self._period_s)
        # The first bubble that is longer than the overhead.
        index = bisect_right(self._ends, phase_s + self._overhead_s)
        if index == len(self._ends):
            return (cycle + 1) * self._total_s
        room_s = self._ends[index] - max(phase_s, self._starts[index]) - self._overhead_s
        return cycle * self._total_s + self._done[index + 1] - room_s

    def time(self, position_s: float) -> float:
        """Return the end of the work that fills the bubbles up to ``position_s``: the inverse of `position`.

        In a pipeline, the time that work takes from the first stage to the last is added.
        """
        return self._time(position_s, self._leaves)

    def _time(self, position_s: float, starts: Sequence[float]) -> float:
        cycle, rest_s = divmod(position_s, self._total_s)
        if rest_s == 0.0:  # the end of a bubble, not the begin of the next
            cycle, rest_s = cycle - 1, self._total_s
        index = bisect_left(self._done, rest_s) - 1
        open_s = starts[index] + self._overhead_s
        return self._origin_s + cycle * self._period_s + open_s + rest_s - self._done[index]

    def positions(self, times_s: np.ndarray) -> np.ndarray:
        """Return `position` of each time, vectorised."""
        cycles, phases_s = np.divmod(times_s - self._origin_s, self._period_s)
        knots_s = [(start, end - self._overhead_s) for start, end in zip(self._starts, self._ends, strict=True)]
        reached_s = list(pairwise(self._done))
        return cycles * self._total_s + np.interp(phases_s, np.ravel(knots_s), np.ravel(reached_s))

    def times(self, positions_s: np.ndarray) -> np.ndarray:
        """Return `time` of each position, vectorised."""
        cycles, rests_s = np.divmod(positions_s, self._total_s)
        cycles, rests_s = np.where(
            rests_s == 0.0, (cycles - 1, np.full_like(rests_s, self._total_s)), (cycles, rests_s)
        )
        index = np.searchsorted(self._done, rests_s) - 1
        opens_s = np.array(self._leaves)[index] + self._overhead_s
        return self._origin_s + cycles * self._period_s + opens_s + rests_s - np.array(self._done)[index]

    def begin(self, free_s: float) -> float:
        """Return when work begins on a worker that is free at ``free_s``, or inf if never."""
        return self._open(free_s)[0] if self._ends else inf

    def _open(self, free_s: float) -> tuple[float, float]:
        """Return the rest of the first bubble from ``free_s`` on that is longer than the overhead: (start, end)."""
        cycle, phase_s = divmod(free_s - self._origin_s, self._period_s)
        index = bisect_right(self._ends, phase_s + self._overhead_s)
        if index == len(self._ends):
            cycle, phase_s, index = cycle + 1, 0.0, 0
        begin_s = self._origin_s + cycle * self._period_s
        return begin_s + max(phase_s, self._starts[index]), begin_s + self._ends[index]

    def end(self, free_s: float, work_s: float) -> float:
        """Return when work ends on a worker that is free at ``free_s``, or inf if never."""
        return self.time(self.position(free_s) + work_s) if self._ends else inf

    def free(self, free_s: float, work_s: float) -> float:
        """Return when a worker that is free at ``free_s`` can begin the next work after this, or inf if never.

        It is `end`, but for a pipeline, whose first stage is free while the last one still works.
        """
        return self._time(self.position(free_s) + work_s, self._starts) if self._ends else inf

    def spans(self, free_s: float, work_s: float) -> Iterator[tuple[float, float]]:
        """Yield when the work runs, including overhead: (start, end), in order. In a pipeline, in the first stage."""
        left_s = work_s if self._ends else 0.0
        while left_s > 0.0:
            begin_s, close_s = self._open(free_s)
            end_s = self.free(free_s, left_s)
            if end_s <= close_s:
                yield begin_s, end_s
                return
            yield begin_s, close_s
            left_s -= close_s - begin_s - self._overhead_s
            free_s = close_s
