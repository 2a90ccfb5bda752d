"""The fleet: what is known of each worker, and which one finishes a prompt soonest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Protocol

from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.pace import Pace
from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.placement.prefill_placement import PrefillPlacement, Slot
from weft.inference.placement.prompt_work import PromptWork
from weft.inference.requests import Refusal

GAP_S = 0.05
"""Idle time before a chunk that predictions are made for: a bubble's first step comes after training's work."""
QUIET_S = 5.0
"""How long a board may predict nothing before its trainer is taken to have ended: on a busy host, or while it
loads or saves, a trainer gives no sign of life for a moment."""
NO_BUBBLES_S = 2
"""When to come again if nothing is predicted at all."""


class Bubbles(Protocol):
    """Where a worker's bubbles are read, as `CommonBubbles` does it."""

    def upcoming(self, horizon_s: float) -> Sequence[tuple[float, float]]:
        """Bubbles of the next ``horizon_s``: (start, end) on the monotonic clock, in order."""
        ...


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A request placed on a worker. Seconds of the monotonic clock.

    Attributes:
        begin_s, end_s: when it would run if the worker were as fast as its cost model.
        expected_s: when it is expected to end, as the worker's last answers came.
    """

    worker: int
    work_s: float
    placed_s: float
    begin_s: float
    end_s: float
    expected_s: float


class Worker:
    """One prefill worker."""

    def __init__(self, index: int, address: PrefillWorkerConfig, board: Bubbles) -> None:
        self.index = index
        self.url = address.url.rstrip("/")
        self.board = board
        self.up = False
        self.heard_s = -inf
        """When it last answered anything."""
        self.pace = Pace()
        self.tickets: list[Ticket] = []
        self.bubbles: Sequence[tuple[float, float]] = ()
        self.bubble_s = 0.0
        """Seconds of bubbles that have passed."""
        self._cost_file = Path(address.cost) if address.cost else None
        self._cost_stamp = 0.0
        self._published_s = -inf
        self.cost = PrefillCost()

    def see(self, bubbles: Sequence[tuple[float, float]], now_s: float) -> None:
        """Take in what its board predicts; a board that says nothing for a moment is believed a little longer."""
        if bubbles:
            self._published_s = now_s
        if bubbles or now_s - self._published_s > QUIET_S:
            self.bubbles = bubbles

    def learn(self, quantile: float) -> None:
        """Read the worker's cost model again if it has changed."""
        if self._cost_file is None:
            return
        try:
            stamp = os.stat(self._cost_file).st_mtime
            if stamp != self._cost_stamp:
                self.cost, self._cost_stamp = PrefillCost.load(self._cost_file, quantile=quantile), stamp
        except (OSError, ValueError):
            return  # not written yet, or by another version: what is known stays

    @property
    def learning(self) -> bool:
        """Whether its cost model rests on too few steps to refuse anyone by."""
        return self._cost_file is not None and self.cost.steps < TRUSTED

    def left_s(self, now_s: float) -> float:
        """Seconds of work that it has not done yet, as far as can be predicted."""
        return sum(_left_s(ticket, now_s) for ticket in self.tickets)


def _left_s(ticket: Ticket, now_s: float) -> float:
    if now_s <= ticket.begin_s:
        return ticket.work_s
    # What should have ended may end any moment.
    return ticket.work_s * max(0.05, (ticket.end_s - now_s) / (ticket.end_s - ticket.begin_s))


class Fleet:
    """All workers. Not safe for threads; nothing in it waits."""

    def __init__(
        self,
        workers: Sequence[tuple[PrefillWorkerConfig, Bubbles]],
        settings: ControllerConfig,
        prefill: PrefillConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know of these workers; none is up yet."""
        self.workers = [Worker(index, address, board) for index, (address, board) in enumerate(workers)]
        self._settings, self._prefill, self._clock = settings, prefill, clock
        self._horizon_s = settings.deadline_s
        self._looked_s = clock()
        self.refresh()

    @property
    def serving(self) -> int:
        """Workers that are up and have bubbles ahead."""
        return sum(1 for worker in self.workers if worker.up and worker.bubbles)

    def refresh(self) -> None:
        """Look at every board and cost model, and predict anew."""
        now_s = self._clock()
        for worker in self.workers:
            worker.bubble_s += sum(
                max(0.0, min(end_s, now_s) - max(start_s, self._looked_s)) for start_s, end_s in worker.bubbles
            )
            worker.see(worker.board.upcoming(self._horizon_s), now_s)
            worker.learn(self._prefill.quantile)
        self._looked_s = now_s
        self._work = self._slowest()
        self._placement = PrefillPlacement(self._horizon_s)
        self._patterns = [self._pattern(worker, now_s) for worker in self.workers]
        for worker in self.workers:
            self._update(worker)

    def place(self, tokens: int, deadline_s: float, *, without: Collection[int] = ()) -> Ticket:
        """Give a prompt to the worker that finishes it soonest.

        Args:
            deadline_s: seconds from now in which it has to end.
            without: workers that do not get it.

        Raises:
            Refusal: no worker would; with when to come again.
        """
        now_s, work_s = self._clock(), self._work.work_s(tokens)
        for index in without:
            self._placement.remove(index)
        slot = self._placement.find(now_s, work_s)
        for index in without:
            self._update(self.workers[index])
        trial = self._trial(now_s, deadline_s, without, only_learning=slot is not None)
        if slot is None:
            if trial is None:
                why = self._why_none(without)
                raise Refusal(503, f"no worker can take a prompt: {why}", retry_after_s=NO_BUBBLES_S)
            slot = trial
        expected_s = self._expected_s(slot, now_s, trial)
        if expected_s - now_s > deadline_s and trial is not None:
            slot, expected_s = trial, trial.end_s
        late_s = expected_s - now_s - deadline_s
        if late_s > 0 and slot is not trial:
            raise Refusal(
                503,
                f"the first token would come after {expected_s - now_s:.1f} s, the deadline is {deadline_s:g} s; "
                f"come again in {ceil(late_s)} s, or go elsewhere",
                retry_after_s=ceil(late_s),
            )
        return self._take(slot, now_s, work_s, expected_s)

    def _take(self, slot: Slot, now_s: float, work_s: float, expected_s: float) -> Ticket:
        worker = self.workers[slot.worker]
        if worker.index in self._placement:
            self._placement.take(slot)
        ticket = Ticket(
            worker=slot.worker,
            work_s=work_s,
            placed_s=now_s,
            begin_s=slot.begin_s,
            end_s=slot.end_s,
            expected_s=expected_s,
        )
        worker.tickets.append(ticket)
        if len(worker.tickets) >= self._settings.max_queue:
            self._placement.remove(worker.index)
        return ticket

    def _expected_s(self, slot: Slot, now_s: float, trial: Slot | None) -> float:
        if slot is trial:
            return slot.end_s
        return now_s + (slot.end_s - now_s) * self.workers[slot.worker].pace.factor(now_s)

    def _trial(self, now_s: float, deadline_s: float, without: Collection[int], *, only_learning: bool) -> Slot | None:
        """A worker that may take a prompt although nothing says that it can: only by working does it learn how fast
        it is.

        One that has hardly learnt takes as many as its queue holds; one whose bubbles seem too
        short takes one at a time, and only where no other can take any.
        """
        open_to_all = [
            worker
            for worker in self.workers
            if worker.up and worker.bubbles and worker.index not in without and len(worker.tickets) < self._most(worker)
        ]
        if only_learning:
            open_to_all = [worker for worker in open_to_all if worker.learning]
        if not open_to_all or deadline_s <= 0.0:
            return None
        least = min(open_to_all, key=lambda worker: len(worker.tickets))
        return Slot(least.index, now_s, now_s + deadline_s)

    def _most(self, worker: Worker) -> int:
        return self._settings.max_queue if worker.learning else 1

    def learn_pace(self, ticket: Ticket) -> None:
        """A ticket has been answered now: how much later than the cost model had it."""
        self.workers[ticket.worker].pace.learn(self._clock(), ticket.placed_s, ticket.end_s)

    def done(self, ticket: Ticket) -> None:
        """The request of a ticket has been answered, or given up."""
        worker = self.workers[ticket.worker]
        worker.tickets.remove(ticket)
        self._update(worker)

    def set_up(self, worker: Worker, up: bool) -> None:
        """Whether the worker answers; one that does not gets nothing."""
        if up:
            worker.heard_s = self._clock()
        if worker.up != up:
            worker.up = up
            self._update(worker)

    def _update(self, worker: Worker) -> None:
        if not worker.up or worker.learning or len(worker.tickets) >= self._settings.max_queue:
            self._placement.remove(worker.index)
            return
        now_s, pattern = self._clock(), self._patterns[worker.index]
        left_s = worker.left_s(now_s)
        self._placement.set(worker.index, pattern, pattern.end(now_s, left_s) if left_s else now_s)

    def _pattern(self, worker: Worker, now_s: float) -> BubblePattern:
        """The bubbles ahead, as if they came again and again."""
        ahead = [(max(0.0, start_s - now_s), min(self._horizon_s, end_s - now_s)) for start_s, end_s in worker.bubbles]
        return BubblePattern(
            [(start_s, end_s) for start_s, end_s in ahead if start_s < end_s],
            self._horizon_s,
            origin_s=now_s,
            overhead_s=self._work.overhead_s,
            guard_s=self._prefill.guard_s,
        )

    def _slowest(self) -> PromptWork:
        """A prompt's work on the slowest worker that has learnt what it is."""
        most = self._prefill.max_tokens
        known = [worker for worker in self.workers if not worker.learning] or self.workers
        works = [PromptWork.of(w.cost, gap_s=GAP_S, chunk_tokens=most, max_tokens=most) for w in known]
        return PromptWork(
            step_s=max(work.step_s for work in works),
            token_s=max(work.token_s for work in works),
            context_s=max(work.context_s for work in works),
            chunk_tokens=most,
            max_tokens=most,
        )

    def _why_none(self, without: Collection[int] = ()) -> str:
        up = [worker for worker in self.workers if worker.up and worker.index not in without]
        if not up:
            return "no worker answers"
        if not any(worker.bubbles for worker in up):
            return "training publishes no bubbles"
        if all(len(worker.tickets) >= self._settings.max_queue for worker in up):
            return f"every queue holds {self._settings.max_queue} requests"
        return "no bubble is long enough for an engine step"
