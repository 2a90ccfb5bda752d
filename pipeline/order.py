"""The execution order: the slots of all ranks such that none comes before what it needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

from weft.pipeline.action import SENDS, Action, Slot, slot_text
from weft.pipeline.dependencies import establishes
from weft.pipeline.schedule import Schedule
from weft.pipeline.schedule_error import ScheduleError


class Visit(NamedTuple):
    """One slot whose needs have been met by the visits before it."""

    rank: int
    place: int
    slot: Slot
    needs: tuple[Action, ...]
    """The facts that its actions need, as `Schedule.dependencies` names them."""


def execution_order(schedule: Schedule, *, turn: Callable[[Visit], Any] | None = None) -> Iterator[Visit]:
    """Visit every slot once: rows in order, ranks as their needs are met (Kahn's algorithm).

    Args:
        turn: sends are visited in the order of this key, which never falls along a row or
            from a send to what depends on it.

    Raises:
        ScheduleError: the rest of the slots wait for each other, or for what no slot does.
    """
    held: list[tuple[Any, Visit]] = []
    sent = None
    done: set[Action] = set()
    fronts = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(schedule.num_ranks))
    while ready or held:
        if ready:
            rank = ready.popleft()
        else:
            _, sent = heappop(held)
            rank = sent.rank
        row = schedule.rows[rank]
        for index in range(fronts[rank], len(row)):
            slot = row[index]
            needs = _needs(schedule, slot)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            visit = Visit(rank, index, slot, needs)
            if turn is not None and slot[0].op in SENDS and visit != sent:
                heappush(held, (turn(visit), visit))
                break
            fronts[rank] = index + 1
            yield visit
            for action in slot:
                for fact in establishes(action):
                    done.add(fact)
                    if fact in waiting:
                        ready.extend(waiting.pop(fact))
    if waiting:
        raise _deadlock(schedule, fronts, waiting)


def time_slots(schedule: Schedule) -> list[list[Slot | None]]:
    """Each rank's row laid on a common clock of equal ticks, one slot per tick, None while idle.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    rows: list[list[Slot | None]] = [[] for _ in schedule.rows]
    ended: dict[Action, int] = {}
    for rank, _, slot, needs in execution_order(schedule):
        tick = max((ended[need] for need in needs), default=0)
        row = rows[rank]
        row += [None] * (tick - len(row))
        row.append(slot)
        ended.update((fact, len(row)) for action in slot for fact in establishes(action))
    return rows


def _needs(schedule: Schedule, slot: Slot) -> tuple[Action, ...]:
    if len(slot) == 1:
        return schedule.dependencies(slot[0])
    return tuple(need for action in slot for need in schedule.dependencies(action))


def _deadlock(schedule: Schedule, fronts: list[int], waiting: dict[Action, list[int]]) -> ScheduleError:
    """Follow from one stuck rank to the rank that it waits for, until the circle closes."""
    where = {
        fact: (rank, index)
        for rank, row in enumerate(schedule.rows)
        for index, slot in enumerate(row)
        for action in slot
        for fact in establishes(action)
    }
    missing = {rank: fact for fact, ranks in waiting.items() for rank in ranks}
    stuck = {rank: fronts[rank] for rank in missing}

    def cell(rank: int) -> str:
        return slot_text(schedule.rows[rank][fronts[rank]])

    rank = min(missing)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        if missing[rank] not in where:
            reason = f"{cell(rank)} on rank {rank} waits for {missing[rank]}, which no rank does"
            return ScheduleError(reason, schedule, rank, fronts[rank], stuck)
        rank = where[missing[rank]][0]
    circle = path[path.index(rank) :]
    waits = []
    for member in circle:
        fact = missing[member]
        holder, index = where[fact]
        behind = f", which stands after {cell(holder)}" if index > fronts[holder] else ", which cannot start"
        waits.append(f"{cell(member)} on rank {member} waits for {fact} on rank {holder}{behind}")
    return ScheduleError("deadlock: " + "; ".join(waits), schedule, rank, fronts[rank], stuck)
