"""A pipeline's bubbles as one pattern: its slots, in which work enters the first stage and leaves the last one.

A slot is a part of a bubble of each stage, in order. All parts are of the same length, and each begins at least a hop
after the one before it ends. So work that takes a part of a slot takes the same part at each stage, and meets no other
work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, inf

from weft.inference.placement.bubble_pattern import BubblePattern

ROUNDS = 16
"""Number of periods in which slots have to repeat. If they do not, those that would overlap are left out."""
SLOT_OVERHEADS = 16.0
"""Longest slot, relative to its overhead: short ones fill a pipeline sooner, and lose more."""
_SAME_S = 1e-7

Spans = Sequence[tuple[float, float]]
Slot = tuple[tuple[float, ...], float]
"""Begin at each stage, and length, in seconds."""


def chain_pattern(
    bubbles: Sequence[Spans],
    period_s: float,
    *,
    hop_s: float,
    overhead_s: float,
    origin_s: float = 0.0,
    guard_s: float = 0.0,
    longest_s: float | None = None,
) -> BubblePattern:
    """Return the pattern of a pipeline, in which work enters the first stage and leaves the last one.

    Work is counted in seconds of one stage, which are the same in all.

    Args:
        bubbles: for each stage, when its rank is idle: (start, end) in seconds from the step's begin.
        period_s: length of a step.
        hop_s: time from the end of a stage to the begin of the next one.
        overhead_s: seconds that work loses in each slot, at each stage.
        origin_s: begin of some step.
        guard_s: seconds kept free at the end of each bubble.
        longest_s: longest slot; None means `SLOT_OVERHEADS`.
    """
    usable = [[(start, end - guard_s) for start, end in joined(spans, period_s)] for spans in bubbles]
    most_s = min(max((end - start for start, end in spans), default=0.0) for spans in usable)
    most_s = min(most_s, SLOT_OVERHEADS * overhead_s if longest_s is None else longest_s)
    slots = slots_of(usable, period_s, hop_s=hop_s, shortest_s=overhead_s, longest_s=most_s)
    return BubblePattern.of_slots(
        [(begins_s[0], begins_s[-1], length_s) for begins_s, length_s in slots],
        period_s,
        origin_s=origin_s,
        overhead_s=overhead_s,
    )


def joined(bubbles: Spans, period_s: float) -> list[tuple[float, float]]:
    """Return the bubbles with the first one as the end of the last one, if that continues in the next period."""
    found = list(bubbles)
    if len(found) > 1 and found[0][0] == 0.0 and found[-1][1] == period_s:
        found = [*found[1:-1], (found[-1][0], period_s + found[0][1])]
    return found


def slots_of(
    bubbles: Sequence[Spans], period_s: float, *, hop_s: float, shortest_s: float, longest_s: float
) -> list[Slot]:
    """Return the slots that enter in one period and repeat in each, in order.

    They are those of a pipeline that always has work, and holds no more than fills the longest bubble of each stage.
    Then each begins as late as it can without ending later, so that work does not wait between stages in vain.

    Args:
        bubbles: of each stage, less the guard. The last one may end in the next period.
        shortest_s: shorter slots are left out.
    """
    if longest_s <= shortest_s or not all(bubbles):
        return []
    ways = _ways(bubbles, period_s, hop_s=hop_s, shortest_s=shortest_s, longest_s=longest_s)
    found: list[Slot] = []
    slot = next(ways)
    for number in range(ROUNDS):
        before, found = found, []
        while slot[0][0] < (number + 1) * period_s:
            found.append(_moved(slot, -number * period_s))
            slot = next(ways)
        if len(before) == len(found) and all(_is_same(*pair) for pair in zip(before, found, strict=True)):
            break
    return _late(_without_overlaps(found, period_s), [_Stage(spans, period_s) for spans in bubbles], hop_s=hop_s)


def _ways(
    bubbles: Sequence[Spans], period_s: float, *, hop_s: float, shortest_s: float, longest_s: float
) -> Iterator[Slot]:
    """Yield slots for ever: each as long as the first stage's bubble allows, and as early as possible elsewhere."""
    stages = [_Stage(spans, period_s) for spans in bubbles]
    most_s = max(end - start for spans in bubbles for start, end in spans)
    leaves_s = [-inf] * (len(stages) * ceil(most_s / longest_s))
    count = 0
    while True:
        at_s = max(stages[0].free_s, leaves_s[count % len(leaves_s)])
        begin_s, end_s = stages[0].open_at(at_s, shortest_s)
        length_s = min(longest_s, end_s - begin_s)
        begins_s = []
        for stage in stages:
            begins_s.append(at_s := stage.take(at_s, length_s))
            at_s += length_s + hop_s
        leaves_s[count % len(leaves_s)] = at_s - hop_s
        count += 1
        yield tuple(begins_s), length_s


class _Stage:
    """The bubbles of a stage, repeated for ever, and when it has done what it took."""

    def __init__(self, bubbles: Spans, period_s: float) -> None:
        self._bubbles, self.period_s = bubbles, period_s
        self._starts, self._ends = [start for start, _ in bubbles], [end for _, end in bubbles]
        self.free_s = 0.0

    def open_at(self, at_s: float, length_s: float) -> tuple[float, float]:
        """Return the first time from ``at_s`` on from which a bubble lasts longer than ``length_s``, and its end."""
        at_s = max(at_s, self.free_s)
        cycle, phase_s = divmod(at_s, self.period_s)
        number = bisect_right(self._ends, phase_s + length_s)
        if self._ends[-1] - self.period_s > phase_s + length_s:  # the last bubble of the period before is open
            cycle, number = cycle - 1, len(self._ends) - 1
        while True:
            if number == len(self._ends):
                cycle, number = cycle + 1, 0
            start_s, end_s = self._bubbles[number]
            start_s, end_s = max(at_s, start_s + cycle * self.period_s), end_s + cycle * self.period_s
            if end_s - start_s > length_s:
                return start_s, end_s
            number += 1

    def latest(self, by_s: float, length_s: float) -> float:
        """Return the latest begin of a part of a bubble that is as long, and ends by then."""
        cycle, phase_s = divmod(by_s - length_s + _SAME_S, self.period_s)
        number = bisect_right(self._starts, phase_s) - 1
        while True:
            if number < 0:
                cycle, number = cycle - 1, len(self._starts) - 1
            start_s, end_s = (edge + cycle * self.period_s for edge in self._bubbles[number])
            if (begin_s := min(by_s, end_s) - length_s) >= start_s - _SAME_S:
                return begin_s
            number -= 1

    def take(self, at_s: float, length_s: float) -> float:
        """Reserve the first ``length_s`` seconds of a bubble from ``at_s`` on, and return when they begin."""
        begin_s, _ = self.open_at(at_s, length_s - _SAME_S)
        self.free_s = begin_s + length_s
        return begin_s


def _late(slots: Sequence[Slot], stages: Sequence[_Stage], *, hop_s: float) -> list[Slot]:
    """Return the slots as they are in the last stage, and as late as possible in the others."""
    rows = [list(begins_s) for begins_s, _ in slots]
    for stage in reversed(range(len(stages) - 1)):
        next_s = inf
        for _ in range(ROUNDS):
            for row, (_, length_s) in zip(reversed(rows), reversed(slots), strict=True):
                row[stage] = next_s = stages[stage].latest(min(row[stage + 1] - hop_s, next_s), length_s)
            if rows[-1][stage] + slots[-1][1] <= (next_s := next_s + stages[stage].period_s) + _SAME_S:
                break
        else:  # where they were
            for row, (begins_s, _) in zip(rows, slots, strict=True):
                row[: stage + 1] = begins_s[: stage + 1]
            break
    return [(tuple(row), length_s) for row, (_, length_s) in zip(rows, slots, strict=True)]


def _moved(slot: Slot, by_s: float) -> Slot:
    return tuple(begin_s + by_s for begin_s in slot[0]), slot[1]


def _is_same(one: Slot, other: Slot) -> bool:
    return abs(one[1] - other[1]) < _SAME_S and all(abs(a - b) < _SAME_S for a, b in zip(one[0], other[0], strict=True))


def _without_overlaps(slots: Sequence[Slot], period_s: float) -> list[Slot]:
    """Return the slots but for the last ones, which would overlap with the next period's first ones."""
    kept = list(slots)
    while len(kept) > 1:
        (firsts_s, _), (lasts_s, length_s) = kept[0], kept[-1]
        if all(last_s + length_s <= first_s + period_s for first_s, last_s in zip(firsts_s, lasts_s, strict=True)):
            break
        kept.pop()
    assert all(one[0][-1] < other[0][-1] for one, other in pairwise(kept))
    return kept
