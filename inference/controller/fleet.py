"""The fleet: the state of each worker, and which one finishes a prompt first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Protocol

from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.peers import Peers
from weft.inference.controller.slowdown import Slowdown
from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.placement.prefill_placement import PrefillPlacement, Slot
from weft.inference.placement.prompt_work import PromptWork
from weft.inference.requests import Refusal

GAP_S = 0.05
"""Idle time before a chunk that predictions assume: a bubble's first step follows training's work."""
QUIET_S = 5.0
"""Seconds that a board may predict nothing before its trainer is considered ended: on a busy host, or while it
loads or saves, a trainer may pause its heartbeats."""
NO_BUBBLES_S = 2
"""Retry-After if no bubbles are predicted."""


class Bubbles(Protocol):
    """Source of a worker's predicted bubbles, such as `CommonBubbles`."""

    def upcoming(self, horizon_s: float) -> Sequence[tuple[float, float]] | None:
        """Bubbles within the next ``horizon_s``: (start, end) on the monotonic clock, in order.

        None if training has ended; empty if it publishes nothing at the moment.
        """
        ...


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A request placed on a worker. Seconds of the monotonic clock.

    Attributes:
        begin_s, end_s: when it runs according to the cost model.
        expected_s: expected end, corrected by the worker's recent slowdown.
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
        """Time of its last response."""
        self.slowdown = Slowdown()
        self.tickets: list[Ticket] = []
        self.bubbles: Sequence[tuple[float, float]] = ()
        self.bubble_s = 0.0
        """Total length of past bubbles."""
        self.others_s = 0.0
        """Work that other controllers have placed on it."""
        self._cost_file = Path(address.cost) if address.cost else None
        self._cost_stamp = 0.0
        self._published_s = -inf
        self.cost = PrefillCost()

    def update_bubbles(self, bubbles: Sequence[tuple[float, float]] | None, now_s: float) -> None:
        """Update the predicted bubbles; the last ones remain valid for a moment if there are none.

        Args:
            bubbles: None if training has ended.
        """
        if bubbles:
            self._published_s = now_s
        if bubbles or bubbles is None or now_s - self._published_s > QUIET_S:
            self.bubbles = bubbles or []

    def reload_cost(self, quantile: float) -> None:
        """Reload the worker's cost model if its file has changed."""
        if self._cost_file is None:
            return
        try:
            stamp = os.stat(self._cost_file).st_mtime
            if stamp != self._cost_stamp:
                self.cost, self._cost_stamp = PrefillCost.load(self._cost_file, quantile=quantile), stamp
        except (OSError, ValueError):
            return  # not written yet, or by another version: keep the current one

    @property
    def learning(self) -> bool:
        """Whether its cost model has seen too few steps to refuse requests by it."""
        return self._cost_file is not None and self.cost.steps < TRUSTED

    def left_s(self, now_s: float) -> float:
        """Estimated seconds of work left in the tickets of this controller.

        A worker computes prompts in their order: however late the first one is, the others are still to come.
        """
        first = sum(_left_s(ticket, now_s) for ticket in self.tickets[:1])
        return first + sum(ticket.work_s for ticket in self.tickets[1:])


def _left_s(ticket: Ticket, now_s: float) -> float:
    if now_s <= ticket.begin_s:
        return ticket.work_s
    # Overdue work may finish at any moment.
    return ticket.work_s * max(0.05, (ticket.end_s - now_s) / (ticket.end_s - ticket.begin_s))


class Fleet:
    """All workers. Not thread-safe; never blocks."""

    def __init__(
        self,
        workers: Sequence[tuple[PrefillWorkerConfig, Bubbles]],
        settings: ControllerConfig,
        prefill: PrefillConfig,
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        """All workers start as down.

        Args:
            peers: other controllers that place prompts on these workers.
        """
        self.workers = [Worker(index, address, board) for index, (address, board) in enumerate(workers)]
        self._settings, self._prefill, self._clock, self._peers = settings, prefill, clock, peers
        self._published_s: dict[str, float] = {}
        self._others_s: Mapping[str, float] = {}
        self._horizon_s = settings.deadline_s
        self._looked_s = clock()
        self.refresh()

    @property
    def max_tokens(self) -> int:
        """Length of prompt and first token that a worker's model takes."""
        return self._prefill.max_tokens

    @property
    def serving(self) -> int:
        """Workers that are up and have bubbles ahead."""
        return sum(1 for worker in self.workers if worker.up and worker.bubbles)

    def refresh(self) -> None:
        """Read every board and cost model, and update predictions."""
        now_s = self._clock()
        if self._peers is not None:
            self._peers.look()
        for worker in self.workers:
            worker.bubble_s += sum(
                max(0.0, min(end_s, now_s) - max(start_s, self._looked_s)) for start_s, end_s in worker.bubbles
            )
            worker.update_bubbles(worker.board.upcoming(self._horizon_s), now_s)
            worker.reload_cost(self._prefill.quantile)
        self._looked_s = now_s
        self._work = self._slowest()
        self._placement = PrefillPlacement(self._horizon_s)
        self._patterns = [self._pattern(worker, now_s) for worker in self.workers]
        for worker in self.workers:
            self._update(worker)
        self._published_s.clear()
        self._publish(*(worker for worker in self.workers if worker.tickets))

    def place(self, tokens: int, deadline_s: float, *, without: Collection[int] = ()) -> Ticket:
        """Place a prompt on the worker that finishes it first.

        Args:
            deadline_s: seconds from now within which it must finish.
            without: workers to exclude.

        Raises:
            Refusal: no worker would finish in time; has `retry_after_s`.
        """
        self._count_others()
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
        elif trial is not None and self._waits(slot) and len(self.workers[trial.worker].tickets) < TRUSTED:
            slot = trial
        expected_s = self._expected_s(slot, now_s, trial)
        if expected_s - now_s > deadline_s and trial is not None:
            slot, expected_s = trial, trial.end_s
        late_s = expected_s - now_s - deadline_s
        if late_s > 0 and slot is not trial:
            raise Refusal(
                503,
                f"the first token would come after {expected_s - now_s:.1f} s, the deadline is {deadline_s:g} s; "
                f"retry in {ceil(late_s)} s, or elsewhere",
                retry_after_s=ceil(late_s),
            )
        return self._take(slot, now_s, work_s, expected_s)

    def _waits(self, slot: Slot) -> bool:
        """True if a prompt in this slot would wait behind others."""
        worker = self.workers[slot.worker]
        return bool(worker.tickets) or worker.others_s > 0.0

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
        self._publish(worker)
        if len(worker.tickets) >= self._settings.max_queue:
            self._placement.remove(worker.index)
        return ticket

    def _expected_s(self, slot: Slot, now_s: float, trial: Slot | None) -> float:
        if slot is trial:
            return slot.end_s
        return now_s + (slot.end_s - now_s) * self.workers[slot.worker].slowdown.factor(now_s)

    def _trial(self, now_s: float, deadline_s: float, without: Collection[int], *, only_learning: bool) -> Slot | None:
        """A worker that may take a prompt without a prediction, because it learns its speed only from work.

        A worker with few measurements takes a few that would wait elsewhere, and as many as its queue
        holds of those that would be late elsewhere. One whose bubbles seem too short takes one at a
        time, and only if no other worker can take any.
        """
        candidates = [
            worker
            for worker in self.workers
            if worker.up
            and worker.bubbles
            and worker.index not in without
            and len(worker.tickets) < self._max_queue(worker)
        ]
        if only_learning:
            candidates = [worker for worker in candidates if worker.learning]
        if not candidates or deadline_s <= 0.0:
            return None
        least = min(candidates, key=lambda worker: len(worker.tickets))
        return Slot(least.index, now_s, now_s + deadline_s)

    def _max_queue(self, worker: Worker) -> int:
        return self._settings.max_queue if worker.learning else 1

    def learn_slowdown(self, ticket: Ticket) -> None:
        """Learn from a ticket that was answered now, how late it was."""
        self.workers[ticket.worker].slowdown.learn(self._clock(), ticket.placed_s, ticket.end_s)

    def done(self, ticket: Ticket) -> None:
        """The request was answered or abandoned."""
        worker = self.workers[ticket.worker]
        worker.tickets.remove(ticket)
        self._update(worker)
        self._publish(worker)

    def close(self) -> None:
        """Withdraw what other controllers count."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _publish(self, *workers: Worker) -> None:
        """Publish the work left on these workers."""
        if self._peers is not None:
            now_s = self._clock()
            self._published_s.update({worker.url: worker.left_s(now_s) for worker in workers})
            self._peers.publish({url: work_s for url, work_s in self._published_s.items() if work_s})

    def _count_others(self) -> None:
        """Update the workers on which other controllers have placed or finished work."""
        others_s = self._peers.work_s() if self._peers is not None else {}
        changed = {
            url for url in others_s.keys() | self._others_s.keys() if others_s.get(url) != self._others_s.get(url)
        }
        self._others_s = others_s
        for worker in self.workers if changed else ():
            if worker.url in changed:
                worker.others_s = others_s.get(worker.url, 0.0)
                self._update(worker)

    def set_up(self, worker: Worker, up: bool) -> None:
        """Set whether the worker is up; only workers that are up get requests."""
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
        left_s = worker.left_s(now_s) + worker.others_s
        self._placement.set(worker.index, pattern, pattern.end(now_s, left_s) if left_s else now_s)

    def _pattern(self, worker: Worker, now_s: float) -> BubblePattern:
        """The predicted bubbles, repeated periodically."""
        ahead = [(max(0.0, start_s - now_s), min(self._horizon_s, end_s - now_s)) for start_s, end_s in worker.bubbles]
        return BubblePattern(
            [(start_s, end_s) for start_s, end_s in ahead if start_s < end_s],
            self._horizon_s,
            origin_s=now_s,
            overhead_s=self._work.overhead_s,
            guard_s=self._prefill.guard_s,
        )

    def _slowest(self) -> PromptWork:
        """The cost of prompts on the slowest worker with a trusted cost model."""
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
