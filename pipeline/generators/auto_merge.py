"""The last pass of `auto`: merge neighbours into full backwards and strand pairs where that delays nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from weft.pipeline.generators.auto_problem import NONE, Problem, Rows
from weft.pipeline.generators.auto_timing import time_rows

_Merge = Callable[[int, int, float], int]
"""Maps two neighbours and the bytes held before them to the merged slot, or NONE."""


def merge_neighbours(problem: Problem, rows: Rows, cap_bytes: float) -> Rows:
    """Merge I and W into B, then forwards and backwards into pairs, if this delays no other slot.

    A full backward sends its gradient only when it ends, and a pair sends both results at its end.
    So each is formed only if no consumer would have started earlier.
    """
    rows = _Merger(problem, rows, cap_bytes).full_backwards()
    paired = _Merger(problem, rows, cap_bytes).strand_pairs()
    before, after = time_rows(problem, rows), time_rows(problem, paired)
    assert before is not None
    return paired if after is not None and after.makespan_s <= before.makespan_s else rows


class _Merger:
    """The slots of one timing, and the slack of each result."""

    def __init__(self, problem: Problem, rows: Rows, cap_bytes: float) -> None:
        self.problem, self.rows, self.cap_bytes = problem, rows, cap_bytes
        timing = time_rows(problem, rows)
        assert timing is not None
        self._end_s, self._arrival_s = timing.end_s, timing.arrival_s
        self._needed_s: dict[int, float] = {}  # by fact, when its consumer starts
        self._followers: dict[int, list[int]] = {}  # by fact, the next transfer on each of its links
        queues: dict[int, list[int]] = {}
        for row in rows:
            for slot in row:
                for part in problem.halves.get(slot, (slot,)):
                    self._needed_s[problem.remote_need[part]] = self._start_s(slot)
                for fact in problem.facts(slot):
                    for line in {problem.link[fact], problem.pair_link[fact]} - {NONE}:
                        queues.setdefault(line, []).append(fact)
        for queue in queues.values():
            for fact, follower in pairwise(sorted(queue, key=self._leaves_s)):
                self._followers.setdefault(fact, []).append(follower)

    def full_backwards(self) -> Rows:
        """Return the rows after merging each I with the W right after it into a B, if the gradient has slack."""
        return [self._merged(row, self._full_backward) for row in self.rows]

    def strand_pairs(self) -> Rows:
        """Return the rows with neighbouring forwards and backwards paired, if both can start at the same time."""
        return [self._merged(row, self._strand_pair) for row in self.rows]

    def _merged(self, row: list[int], merge: _Merge) -> list[int]:
        merged: list[int] = []
        level, index = 0.0, 0
        while index < len(row):
            slot = row[index]
            both = merge(slot, row[index + 1], level) if index + 1 < len(row) else NONE
            index += 1 if both == NONE else 2
            merged.append(slot if both == NONE else both)
            level += self.problem.net_bytes[merged[-1]]
        return merged

    def _full_backward(self, one: int, other: int, level: float) -> int:
        whole = self.problem.full_backward(one, other)
        if whole == NONE or level + self.problem.start_bytes[whole] > self.cap_bytes:
            return NONE
        return whole if self._delay(one, self.problem.seconds[other]) else NONE

    def _strand_pair(self, one: int, other: int, level: float) -> int:
        problem = self.problem
        pair = problem.strand_pair(one, other)
        if pair == NONE or level + problem.start_bytes[pair] > self.cap_bytes:
            return NONE
        first, second = problem.facts(one)[0], problem.facts(other)[0]
        start_s, need = self._start_s(one), problem.remote_need[other]
        arrived = need == NONE or self._arrival_s[need] <= start_s
        same_link = problem.link[first] != NONE and problem.link[first] == problem.link[second]
        later_s = start_s + problem.seconds[pair] - self._end_s[one]
        if not arrived or same_link or not self._delay(first, later_s):
            return NONE
        self._needed_s[need] = start_s
        return pair

    def _delay(self, fact: int, seconds: float) -> bool:
        """Delay a result if this delays none of its consumers; return True if it was possible."""
        problem = self.problem
        if problem.receiver[fact] == NONE or seconds <= 0:
            return True
        arrival_s = self._arrival_s[fact] + seconds
        if arrival_s > self._needed_s[fact]:
            return False
        gone_s = arrival_s - problem.latency_s[fact]
        if any(gone_s > self._leaves_s(follower) for follower in self._followers.get(fact, ())):
            return False
        self._arrival_s[fact] = arrival_s
        return True

    def _leaves_s(self, fact: int) -> float:
        return self._arrival_s[fact] - self.problem.latency_s[fact] - self.problem.transit_s[fact]

    def _start_s(self, slot: int) -> float:
        return self._end_s[slot] - self.problem.seconds[slot]
