"""Prediction of a rank's bubbles from its last steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Forecast:
    """Predicted edges of a step, in seconds from the step's begin.

    Attributes:
        typical_s: median time of each edge. Even edges open bubbles, odd edges close them.
        earliest_s: minimum time of each edge.
        shortest_s: minimum time between each edge and the previous one, or 0 for edge 0.
        period_s: median time between step begins, or 0 if unknown.
        num_steps: number of measured steps, or 0 for the schedule's prediction.
    """

    typical_s: tuple[float, ...]
    earliest_s: tuple[float, ...]
    shortest_s: tuple[float, ...]
    period_s: float
    num_steps: int

    def closes_s(self, edge: int, at_s: float) -> float | None:
        """Return the earliest end of the bubble that ``edge`` opened ``at_s`` after the begin, or None if unknown.

        This is the minimum of two predictions, one from the step's begin and one from the edge itself, because a step
        that is late on all ranks cannot be distinguished from one that is late on this rank only.
        """
        if edge + 1 >= len(self.typical_s):
            return None
        return min(self.earliest_s[edge + 1], at_s + self.shortest_s[edge + 1])

    def bubbles(
        self, edge: int, at_s: float, now_s: float, until_s: float, *, is_cautious: bool = False
    ) -> Iterator[tuple[float, float]]:
        """Yield the bubbles from ``now_s`` to ``until_s``, as (start, end) after the begin of the running step.

        Args:
            edge: the latest edge of the running step, ``at_s`` after its begin.
            is_cautious: True yields each bubble as short as it ever was.
        """
        if not self.typical_s:
            return
        edge = min(edge, len(self.typical_s) - 1)
        shift_s = at_s - self.typical_s[edge]
        if edge + 1 < len(self.typical_s):
            shift_s = max(shift_s, now_s - self.typical_s[edge + 1])
        begin_s = 0.0
        while begin_s + shift_s < until_s:
            for opens, closes, least in zip(
                self.typical_s[::2], self.typical_s[1::2], self.shortest_s[1::2], strict=False
            ):
                closes = min(closes, opens + least) if is_cautious else closes
                start_s, end_s = max(begin_s + shift_s + opens, now_s), begin_s + shift_s + closes
                if start_s < until_s and end_s > start_s:
                    yield start_s, end_s
            if self.period_s <= 0.0:
                return
            begin_s += self.period_s


def forecast(steps: Sequence[Sequence[float]], begins_s: Sequence[float]) -> Forecast:
    """Return a forecast from measured steps of one kind.

    Args:
        steps: edges of each step, in seconds from its begin. All steps have equally many.
        begins_s: begins of consecutive steps.
    """
    columns = list(zip(*steps, strict=True))
    gaps = [[later - earlier for earlier, later in zip(a, b, strict=True)] for a, b in pairwise(columns)]
    periods = [later - earlier for earlier, later in pairwise(begins_s)]
    return Forecast(
        typical_s=tuple(map(median, columns)),
        earliest_s=tuple(map(min, columns)),
        shortest_s=(0.0, *map(min, gaps)),
        period_s=median(periods) if periods else 0.0,
        num_steps=len(steps),
    )


def planned(edges_s: Sequence[float], period_s: float = 0.0) -> Forecast:
    """Return a forecast from the schedule, for use before any step is measured."""
    edges = tuple(edges_s)
    gaps = tuple(later - earlier for earlier, later in pairwise(edges))
    return Forecast(edges, edges, (0.0, *gaps) if edges else (), period_s, 0)
