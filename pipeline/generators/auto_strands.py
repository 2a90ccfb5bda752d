"""The last touch: full backwards and strand pairs wherever they delay nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from weft.pipeline.generators.auto_problem import NONE, Problem, Rows
from weft.pipeline.generators.auto_timing import time_rows

_Form = Callable[[int, int, float], int]
"""From two neighbours and the bytes held before them to the slot that they form, or NONE."""


def couple(problem: Problem, rows: Rows, cap_bytes: float) -> Rows:
    """Join I and W to B, then forwards and backwards to pairs, so that no slot starts later.

    A full backward hands on its gradient at its end only, and a pair both of its results; so
    each is formed only if who needs the result was not going to start before.
    """
    rows = _Coupler(problem, rows, cap_bytes).full_backwards()
    paired = _Coupler(problem, rows, cap_bytes).strand_pairs()
    before, after = time_rows(problem, rows), time_rows(problem, paired)
    assert before is not None
    return paired if after is not None and after.makespan_s <= before.makespan_s else rows


class _Coupler:
    """Slots of one timing, and how long each of their results can wait."""

    def __init__(self, problem: Problem, rows: Rows, cap_bytes: float) -> None:
        self.problem, self.rows, self.cap_bytes = problem, rows, cap_bytes
        timing = time_rows(problem, rows)
        assert timing is not None
        self._end_s, self._arrival_s = timing.end_s, timing.arrival_s
        self._needed_s: dict[int, float] = {}  # by fact, when who waits for it starts
        self._followers: dict[int, list[int]] = {}  # by fact, the next on each of its links
        queues: dict[int, list[int]] = {}
        for row in rows:
            for slot in row:
                for part in problem.halves.get(slot, (slot,)):
                    self._needed_s[problem.waits[part]] = self._start_s(slot)
                for fact in problem.facts(slot):
                    for line in {problem.link[fact], problem.way[fact]} - {NONE}:
                        queues.setdefault(line, []).append(fact)
        for queue in queues.values():
            for fact, follower in pairwise(sorted(queue, key=self._leaves_s)):
                self._followers.setdefault(fact, []).append(follower)

    def full_backwards(self) -> Rows:
        """The rows with a B for each I that its W follows at once, if the gradient can wait."""
        return [self._formed(row, self._full_backward) for row in self.rows]

    def strand_pairs(self) -> Rows:
        """The rows with neighbouring forwards and backwards paired, if both can start at once."""
        return [self._formed(row, self._strand_pair) for row in self.rows]

    def _formed(self, row: list[int], form: _Form) -> list[int]:
        """The row with neighbours replaced by what they form."""
        formed: list[int] = []
        level, index = 0.0, 0
        while index < len(row):
            slot = row[index]
            both = form(slot, row[index + 1], level) if index + 1 < len(row) else NONE
            index += 1 if both == NONE else 2
            formed.append(slot if both == NONE else both)
            level += self.problem.in_all[formed[-1]]
        return formed

    def _full_backward(self, one: int, other: int, level: float) -> int:
        whole = self.problem.whole(one, other)
        if whole == NONE or level + self.problem.at_start[whole] > self.cap_bytes:
            return NONE
        return whole if self._delay(one, self.problem.seconds[other]) else NONE

    def _strand_pair(self, one: int, other: int, level: float) -> int:
        problem = self.problem
        pair = problem.strands(one, other)
        if pair == NONE or level + problem.at_start[pair] > self.cap_bytes:
            return NONE
        first, second = problem.facts(one)[0], problem.facts(other)[0]
        start_s, need = self._start_s(one), problem.waits[other]
        there = need == NONE or self._arrival_s[need] <= start_s
        one_way = problem.link[first] != NONE and problem.link[first] == problem.link[second]
        late_s = start_s + problem.seconds[pair] - self._end_s[one]
        if not there or one_way or not self._delay(first, late_s):
            return NONE
        self._needed_s[need] = start_s
        return pair

    def _delay(self, fact: int, seconds: float) -> bool:
        """Hold a fact back, if nobody starts later for it."""
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
        """When the transfer of a fact begins."""
        return self._arrival_s[fact] - self.problem.latency_s[fact] - self.problem.transit_s[fact]

    def _start_s(self, slot: int) -> float:
        return self._end_s[slot] - self.problem.seconds[slot]
