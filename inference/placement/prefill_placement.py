"""Placement of prefills: finds the worker whose bubbles finish a prompt first."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from weft.inference.placement.bounds import PlacementBounds
from weft.inference.placement.bubble_pattern import BubblePattern

_EQUAL_S = 1e-6
"""End times closer than this are ties."""
_SMALL_HEAP = 4
"""In larger heaps the next worker is likely to be free as well."""


class Slot(NamedTuple):
    """A worker and the times of a prompt on it, in seconds of the patterns' clock.

    Attributes:
        free_s: when the worker can begin another prompt: `end_s`, but for a pipeline.
    """

    worker: int
    begin_s: float
    end_s: float
    free_s: float


class _Group:
    """Workers with equal patterns: a heap of (free time, worker), with lazily deleted entries."""

    __slots__ = ("heap", "pattern", "row", "table")

    def __init__(self, pattern: BubblePattern, table: _Table, row: int) -> None:
        self.pattern = pattern
        self.table = table
        self.row = row
        self.heap: list[tuple[float, int]] = []


class _Table:
    """Bounds of several groups, and the group of each row."""

    __slots__ = ("bounds", "groups")

    def __init__(self, period_s: float) -> None:
        self.bounds = PlacementBounds(period_s)
        self.groups: dict[int, _Group] = {}


class PrefillPlacement:
    """The workers of one training run, by bubble pattern and free time.

    Of workers with equal patterns, the one that is free first finishes first. So each pattern has a heap that yields
    one candidate. `find` is a best-first search: it evaluates candidates in order of their lower bounds, until no other
    bound is below the best end. Each table has a thousand patterns. A worker that is free in a long enough bubble ends
    the search early.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._tables = [_Table(period_s)]
        self._first = 0
        self._overhead_s = inf
        self._last: _Group | None = None
        self._by_pattern: dict[BubblePattern, _Group] = {}
        self._of_worker: dict[int, tuple[_Group, float]] = {}

    def set(self, worker: int, pattern: BubblePattern, free_s: float) -> None:
        """Add or update a worker.

        Args:
            free_s: time at which the worker's current work ends.

        Raises:
            ValueError: the pattern has another period.
        """
        if pattern.period_s != self._period_s:
            raise ValueError(f"the pattern's period is {pattern.period_s:g} s, the run's {self._period_s:g} s")
        if not pattern.capacity_s:
            self.remove(worker)
            return
        group = self._by_pattern.get(pattern)
        if group is None:
            group = self._by_pattern[pattern] = self._add(pattern)
        self._assign(worker, group, free_s)
        group.table.bounds.at(group.row, pattern.position(group.heap[0][0]))

    def remove(self, worker: int) -> None:
        """Remove a worker, if present."""
        self._of_worker.pop(worker, None)

    def find(self, now_s: float, work_s: float) -> Slot | None:
        """Return the slot with the earliest end for work that arrives now, or None if no worker has bubbles.

        Args:
            now_s: current time, which must not decrease between calls.
            work_s: seconds of work, above 0. See `PromptWork.work_s`.
        """
        floor_s = now_s + work_s + self._overhead_s + _EQUAL_S
        if (slot := self._repeat_last(now_s, work_s, floor_s)) is not None:
            return slot
        best: _Group | None = None
        best_s, best_free_s, worker = inf, 0.0, 0
        for table in self._rotated():
            if best_s <= floor_s:  # it runs immediately, within one bubble
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
        return _slot(worker, best.pattern, best_free_s, work_s, best_s) if best else None

    def _repeat_last(self, now_s: float, work_s: float, floor_s: float) -> Slot | None:
        """Return a slot on a worker with the last result's pattern that is free in a long enough bubble, or None."""
        group = self._last
        head = self._head(group) if group is not None and len(group.heap) > 1 else None
        if group is None or head is None or head[0] > now_s:
            return None
        end_s = group.pattern.end(now_s, work_s)
        return _slot(head[1], group.pattern, now_s, work_s, end_s) if end_s <= floor_s else None

    def _rotated(self) -> list[_Table]:
        """Return all tables, starting with another one each time, to spread work."""
        if len(self._tables) > 1:
            self._first = (self._first + 1) % len(self._tables)
        return self._tables[self._first :] + self._tables[: self._first]

    def take(self, slot: Slot) -> None:
        """Assign the work of ``slot`` to its worker."""
        group = self._of_worker[slot.worker][0]
        self._assign(slot.worker, group, slot.free_s)
        if len(group.heap) <= _SMALL_HEAP:
            head = self._head(group)
            assert head is not None  # the slot's worker
            group.table.bounds.at(group.row, group.pattern.position(head[0]))

    def _add(self, pattern: BubblePattern) -> _Group:
        table = next((table for table in self._tables if not table.bounds.full), None)
        if table is None:
            table = _Table(self._period_s)
            self._tables.append(table)
        self._overhead_s = min(self._overhead_s, pattern.overhead_s + pattern.least_delay_s)
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


def _slot(worker: int, pattern: BubblePattern, free_s: float, work_s: float, end_s: float) -> Slot:
    return Slot(worker, pattern.begin(free_s), end_s, pattern.free(free_s, work_s))
