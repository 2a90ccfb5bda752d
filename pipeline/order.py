"""The execution order: a topological order of the slots of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

from weft.pipeline.action import SENDS, Action, Slot, slot_text
from weft.pipeline.dependencies import establishes
from weft.pipeline.schedule import Schedule, ScheduleError


class Visit(NamedTuple):
    """One slot in the execution order, with all its dependencies met by previous visits."""

    rank: int
    position: int
    slot: Slot
    needs: tuple[Action, ...]
    """The facts that its actions depend on, as `Schedule.dependencies` names them."""


def execution_order(schedule: Schedule, *, send_key: Callable[[Visit], Any] | None = None) -> Iterator[Visit]:
    """Visit every slot once, each row in order (Kahn's algorithm).

    Args:
        send_key: visit sends in the order of this key. It must not decrease along a row, nor
            from a send to what depends on it.

    Raises:
        ScheduleError: the remaining slots wait for each other, or for an action that no slot has.
    """
    pending_sends: list[tuple[Any, Visit]] = []
    sent = None
    done: set[Action] = set()
    fronts = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(schedule.num_ranks))
    while ready or pending_sends:
        if ready:
            rank = ready.popleft()
        else:
            _, sent = heappop(pending_sends)
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
            if send_key is not None and slot[0].op in SENDS and visit != sent:
                heappush(pending_sends, (send_key(visit), visit))
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


def visits_of(schedule: Schedule) -> list[list[Visit]]:
    """Return the visits of each row in order, for callers that schedule across rows themselves."""
    return [
        [Visit(rank, index, slot, _needs(schedule, slot)) for index, slot in enumerate(row)]
        for rank, row in enumerate(schedule.rows)
    ]


def time_slots(schedule: Schedule) -> list[list[Slot | None]]:
    """Return the rows on a common clock of equal ticks: one slot per tick, None while idle.

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
    """Follow each stuck rank to the rank that it waits for, until the cycle closes."""
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
    cycle = path[path.index(rank) :]
    waits = []
    for member in cycle:
        fact = missing[member]
        holder, index = where[fact]
        behind = f", which stands after {cell(holder)}" if index > fronts[holder] else ", which cannot start"
        waits.append(f"{cell(member)} on rank {member} waits for {fact} on rank {holder}{behind}")
    return ScheduleError("deadlock: " + "; ".join(waits), schedule, rank, fronts[rank], stuck)
