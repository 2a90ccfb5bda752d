"""The last touch: full backwards and strand pairs wherever they delay nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from weft.pipeline.generators.auto_problem import NONE, Problem, Rows
from weft.pipeline.generators.auto_timing import time_rows

_ROUNDING = 1e-9
_Form = Callable[[int, int, float], int]
"""From two neighbours and the bytes held before them to the slot that they form, or NONE."""


def couple(problem: Problem, rows: Rows, cap_bytes: float) -> Rows:
    """Join I and W to B, then forwards and backwards to pairs, so that no slot starts later.

    A full backward hands on its gradient at its end only, and a pair both of its results; so
    each is formed only if who needs the result was not going to start before.
    """
    rows = _Coupler(problem, rows, cap_bytes).full_backwards()
    return _Coupler(problem, rows, cap_bytes).strand_pairs()


class _Coupler:
    """Slots of one timing, and how long each of their results can wait."""

    def __init__(self, problem: Problem, rows: Rows, cap_bytes: float) -> None:
        self.problem, self.rows, self.cap_bytes = problem, rows, cap_bytes
        timing = time_rows(problem, rows)
        assert timing is not None
        self._end_s, self._arrival_s = timing.end_s, timing.arrival_s
        self._needed_s: dict[int, float] = {}  # by fact, when who waits for it starts
        self._follower: dict[int, int] = {}  # by fact, the next on its link
        for row in rows:
            queues: dict[int, list[int]] = {}
            for slot in row:
                for part in problem.halves.get(slot, (slot,)):
                    self._needed_s[problem.waits[part]] = self._start_s(slot)
                for fact in problem.facts(slot):
                    queues.setdefault(problem.link[fact], []).append(fact)
            queues.pop(NONE, None)
            for queue in queues.values():
                self._follower.update(pairwise(queue))

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
        there = need == NONE or self._arrival_s[need] <= start_s + _ROUNDING
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
        follower = self._follower.get(fact)
        if arrival_s > self._needed_s[fact] + _ROUNDING:
            return False
        if follower is not None:
            leaves_s = self._arrival_s[follower] - problem.latency_s[follower] - problem.occupancy_s[follower]
            if arrival_s - problem.latency_s[fact] > leaves_s + _ROUNDING:
                return False
        self._arrival_s[fact] = arrival_s
        return True

    def _start_s(self, slot: int) -> float:
        return self._end_s[slot] - self.problem.seconds[slot]
