"""The placement of prefills: which worker's bubbles finish a prompt soonest."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from weft.inference.placement.bounds import PlacementBounds
from weft.inference.placement.bubble_pattern import BubblePattern

_EQUAL_S = 1e-6
"""Ends that are closer than this are equally good."""
_FEW = 4
"""Entries of a heap; where there are more, one that is free is likely to be the next."""


class Slot(NamedTuple):
    """Where and when a prompt would run, in seconds on the clock of the patterns."""

    worker: int
    begin_s: float
    end_s: float


class _Group:
    """Workers with equal patterns: a heap of (when it is free, worker), and entries that no longer hold."""

    __slots__ = ("heap", "pattern", "row", "table")

    def __init__(self, pattern: BubblePattern, table: _Table, row: int) -> None:
        self.pattern = pattern
        self.table = table
        self.row = row
        self.heap: list[tuple[float, int]] = []


class _Table:
    """Bounds of some groups, and the group of each row."""

    __slots__ = ("bounds", "groups")

    def __init__(self, period_s: float) -> None:
        self.bounds = PlacementBounds(period_s)
        self.groups: dict[int, _Group] = {}


class PrefillPlacement:
    """The workers of one training run, by their bubbles and by when they are free.

    Of workers with equal patterns the one that is free first finishes first, so that a heap
    for each pattern leaves one candidate of each. `find` looks closely at the candidate that
    could finish first by its bound, then at the next, until what it has found is no later
    than what any other could reach. Patterns lie in tables of a thousand; where one has a
    worker that is free in a bubble long enough, nothing in the others can be better.
    """

    def __init__(self, period_s: float) -> None:
        """No workers yet; the run's steps take ``period_s``."""
        self._period_s = period_s
        self._tables = [_Table(period_s)]
        self._first = 0
        self._overhead_s = inf
        self._last: _Group | None = None
        self._by_pattern: dict[BubblePattern, _Group] = {}
        self._of_worker: dict[int, tuple[_Group, float]] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._of_worker

    def __len__(self) -> int:
        return len(self._of_worker)

    def set(self, worker: int, pattern: BubblePattern, free_s: float) -> None:
        """Add a worker, or change what is known of it.

        Args:
            free_s: when what it has been given is done.

        Raises:
            ValueError: the pattern's period is not the run's.
        """
        if pattern.period_s != self._period_s:
            raise ValueError(f"a pattern of {pattern.period_s:g} s in a run with steps of {self._period_s:g} s")
        if not pattern.capacity_s:
            self.remove(worker)
            return
        group = self._by_pattern.get(pattern)
        if group is None:
            group = self._by_pattern[pattern] = self._add(pattern)
        self._assign(worker, group, free_s)
        group.table.bounds.at(group.row, pattern.position(group.heap[0][0]))

    def remove(self, worker: int) -> None:
        """Give a worker nothing more; one that is not here is no error."""
        self._of_worker.pop(worker, None)

    def find(self, now_s: float, work_s: float) -> Slot | None:
        """The slot that ends first for work that arrives now; None if no worker has bubbles.

        Args:
            now_s: never before an earlier call's.
            work_s: above 0; see `PromptWork.work_s`.
        """
        floor_s = now_s + work_s + self._overhead_s + _EQUAL_S
        if (slot := self._as_before(now_s, work_s, floor_s)) is not None:
            return slot
        best: _Group | None = None
        best_s, best_free_s, worker = inf, 0.0, 0
        for table in self._in_turn():
            if best_s <= floor_s:  # it runs at once and without a break
                break
            reach_s, from_s = table.bounds.reach_s(now_s, work_s)
            while best_s > floor_s:
                row = int(reach_s.argmin())
                group = table.groups.get(row)
                if group is None or reach_s.item(row) >= best_s - from_s - _EQUAL_S:
                    break
                reach_s[row] = inf
                head = self._head(group)
                if head is None:
                    self._drop(group)
                    continue
                free_s = max(head[0], now_s)
                position_s = group.pattern.position(free_s)
                table.bounds.at(row, position_s)
                end_s = group.pattern.time(position_s + work_s)
                if end_s < best_s:
                    best, best_s, best_free_s, worker = group, end_s, free_s, head[1]
        self._last = best
        return Slot(worker, best.pattern.begin(best_free_s), best_s) if best else None

    def _as_before(self, now_s: float, work_s: float, floor_s: float) -> Slot | None:
        """Another worker with the pattern of the last answer, if it is free and the same bubble is long enough."""
        group = self._last
        head = self._head(group) if group is not None and len(group.heap) > 1 else None
        if group is None or head is None or head[0] > now_s:
            return None
        end_s = group.pattern.end(now_s, work_s)
        return Slot(head[1], group.pattern.begin(now_s), end_s) if end_s <= floor_s else None

    def _in_turn(self) -> list[_Table]:
        """All tables; each in turn is the first, so that work is spread."""
        if len(self._tables) > 1:
            self._first = (self._first + 1) % len(self._tables)
        return self._tables[self._first :] + self._tables[: self._first]

    def take(self, slot: Slot) -> None:
        """The work of ``slot`` is its worker's."""
        group = self._of_worker[slot.worker][0]
        self._assign(slot.worker, group, slot.end_s)
        if len(group.heap) <= _FEW:
            head = self._head(group)
            assert head is not None  # that worker
            group.table.bounds.at(group.row, group.pattern.position(head[0]))

    def _add(self, pattern: BubblePattern) -> _Group:
        table = next((table for table in self._tables if not table.bounds.full), None)
        if table is None:
            table = _Table(self._period_s)
            self._tables.append(table)
        self._overhead_s = min(self._overhead_s, pattern.overhead_s)
        group = _Group(pattern, table, table.bounds.add(pattern))
        table.groups[group.row] = group
        return group

    def _assign(self, worker: int, group: _Group, free_s: float) -> None:
        self._of_worker[worker] = (group, free_s)
        heappush(group.heap, (free_s, worker))

    def _head(self, group: _Group) -> tuple[float, int] | None:
        heap = group.heap
        while heap and self._of_worker.get(heap[0][1]) != (group, heap[0][0]):
            heappop(heap)
        return heap[0] if heap else None

    def _drop(self, group: _Group) -> None:
        group.table.bounds.drop(group.row)
        del group.table.groups[group.row], self._by_pattern[group.pattern]
