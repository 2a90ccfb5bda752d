"""The fleet: all workers, and which one finishes a prompt first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import ceil

from weft.conf.schema import ControllerConfig, PrefillConfig, PrefillWorkerConfig
from weft.inference.controller.peers import NONE, Peers, PlacedWork
from weft.inference.controller.worker import Bubbles, Ticket, Worker
from weft.inference.placement.prefill_cost import TRUSTED
from weft.inference.placement.prefill_placement import PrefillPlacement, Slot
from weft.inference.placement.prompt_work import PromptWork
from weft.inference.requests import Refusal

GAP_S = 0.05
"""Idle time before a chunk that predictions assume: a bubble's first step follows training's work."""
MAX_PLACEMENTS = 4
"""Number of placements of a prompt if other controllers take its bubbles first."""
MOST_BUBBLES = 512
"""Number of predicted bubbles of a worker, after which they repeat: the work of `Fleet.refresh`."""
NO_BUBBLES_S = 2
"""Retry-After if no bubbles are predicted."""


class Fleet:
    """All workers of a controller. Not thread-safe. Never blocks."""

    def __init__(
        self,
        workers: Sequence[tuple[PrefillWorkerConfig, Sequence[Bubbles]]],
        settings: ControllerConfig,
        prefill: PrefillConfig,
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
        *,
        cache_token_s: float = 0.0,
    ) -> None:
        """Create the fleet with all workers down.

        Args:
            workers: each with the bubbles of its stages.
            peers: other controllers that place prompts on these workers.
            cache_token_s: seconds that a token's cache takes to the decode server from a worker at another site.
        """
        self.workers = [Worker(index, address, boards) for index, (address, boards) in enumerate(workers)]
        self._settings, self._prefill, self._clock, self._peers = settings, prefill, clock, peers
        self._others: dict[str, PlacedWork] = {}
        self._published: dict[str, PlacedWork] = {}
        self.horizon_s = settings.deadline_s
        """Seconds of predicted bubbles."""
        self._cache_token_s = cache_token_s
        far = [worker for worker in self.workers if worker.is_remote and not worker.decode_url and cache_token_s]
        self._far = {worker.index for worker in far}
        self.refresh()

    @property
    def decoders(self) -> list[str]:
        """URL of the decode server near each worker, empty without one."""
        return [worker.decode_url for worker in self.workers]

    @property
    def max_tokens(self) -> int:
        """Maximum length of prompt and first token that a worker's model accepts."""
        return self._prefill.max_tokens

    @property
    def quantile(self) -> float:
        """Share of steps that should finish within the prediction."""
        return self._prefill.quantile

    @property
    def serving(self) -> int:
        """Number of workers that are up and have bubbles ahead."""
        return sum(1 for worker in self.workers if worker.up and worker.bubbles)

    def refresh(self) -> None:
        """Read every board and cost model, and update predictions."""
        now_s = self._clock()
        if self._peers is not None:
            self._peers.refresh()
        for worker in self.workers:
            worker.refresh(now_s, self.horizon_s, self._prefill.quantile)
        self._has_known = any(not worker.learning for worker in self.workers)
        self._work = self._slowest()
        self._placement = PrefillPlacement(self.horizon_s)
        for worker in self.workers:
            worker.set_pattern(self.horizon_s, overhead_s=self._work.overhead_s, guard_s=self._prefill.guard_s)
            self._update(worker)
        self._publish(*(worker for worker in self.workers if worker.key in self._published))
        self.horizon_s = min([self._settings.deadline_s, *(MOST_BUBBLES * worker.spacing_s for worker in self.workers)])

    def place(self, tokens: int, deadline_s: float, *, without: Collection[int] = ()) -> Ticket:
        """Place a prompt on the worker that finishes it first.

        Controllers do not wait for each other. Each publishes its placement, then reads the placements of others, and
        withdraws its own if the prompt would be late. Of two simultaneous placements, at least one counts the other.

        Args:
            deadline_s: seconds from now within which the prompt must finish.
            without: indices of workers to exclude.

        Raises:
            Refusal: no worker would finish in time. A retry may succeed after its `retry_after_s`.
        """
        self._count_others()
        for _ in range(MAX_PLACEMENTS):
            ticket, is_predicted = self._place(tokens, deadline_s, without)
            worker = self.workers[ticket.worker]
            latest_s = ticket.placed_s + deadline_s
            if not self._count_others() or not is_predicted or worker.latest_s(ticket.placed_s) <= latest_s:
                return ticket
            worker.tickets.remove(ticket)
            self._changed(worker)
        raise Refusal(503, "other controllers place prompts at the same time; retry in 1 s", retry_after_s=1)

    def _place(self, tokens: int, deadline_s: float, without: Collection[int]) -> tuple[Ticket, bool]:
        """Return a published ticket, and whether its end is predicted."""
        now_s, work_s, cache_s = self._clock(), self._work.work_s(tokens), tokens * self._cache_token_s
        latest_s = now_s + deadline_s
        late = {index for index in self._far if self.workers[index].arrival_s(now_s, cache_s) > latest_s}
        without = late.union(without)
        slot = self._find(now_s, work_s, without)
        if slot is not None and slot.worker in self._far:
            near = self._find(now_s, work_s, without | self._far)
            if near is not None and near.end_s <= self.workers[slot.worker].arrival_s(slot.end_s, cache_s):
                slot = near
        trial = self._trial(deadline_s, without, is_predicted=slot is not None)
        if slot is None:
            if trial is None:
                why = "a cache for another site would arrive late" if late else self._why_none(without)
                raise Refusal(503, f"no worker can take a prompt: {why}", retry_after_s=NO_BUBBLES_S)
            return self._take(trial, now_s, work_s, latest_s, cache_s), False
        worker = self.workers[slot.worker]
        if trial is not None and worker.waits():
            return self._take(trial, now_s, work_s, latest_s, cache_s), False
        expected_s = worker.end_s(now_s, max(now_s, worker.free_s(now_s)), work_s)
        end_s = worker.latest_s(now_s, work_s)
        if worker.index in self._far:
            end_s = worker.arrival_s(end_s, cache_s)
        late_s = end_s - latest_s
        if late_s <= 0.0:
            return self._take(worker, now_s, work_s, expected_s, cache_s), True
        if not worker.waits() and worker.slowdown.is_old(now_s) and expected_s <= latest_s:
            return self._take(worker, now_s, work_s, expected_s, cache_s), False  # measure if it is still as slow
        if trial is not None:
            return self._take(trial, now_s, work_s, latest_s, cache_s), False
        raise Refusal(
            503,
            f"the first token may come after {end_s - now_s:.1f} s, the deadline is {deadline_s:g} s; "
            f"retry in {ceil(late_s)} s, or elsewhere",
            retry_after_s=ceil(late_s),
        )

    def _find(self, now_s: float, work_s: float, without: Collection[int]) -> Slot | None:
        for index in without:
            self._placement.remove(index)
        slot = self._placement.find(now_s, work_s)
        for index in without:
            self._update(self.workers[index])
        return slot

    def _take(self, worker: Worker, now_s: float, work_s: float, expected_s: float, cache_s: float) -> Ticket:
        if worker.index in self._far:
            worker.sent_s = worker.arrival_s(expected_s, cache_s)
        ticket = worker.take(now_s, work_s, expected_s)
        self._changed(worker)
        return ticket

    def _trial(self, deadline_s: float, without: Collection[int], *, is_predicted: bool) -> Worker | None:
        """Return a worker for a prompt without a prediction, because workers learn their speed only from work; or None.

        If another worker is predicted to finish in time, a worker with few measurements may take the prompt instead,
        and has a few such prompts at a time. If no worker is, because bubbles seem too short, a worker with few
        measurements takes as many prompts as its queue holds, and any other worker one at a time.
        """

        def most(worker: Worker) -> int:
            if worker.learning:
                return TRUSTED if is_predicted else self._settings.max_queue
            return 0 if is_predicted else 1

        candidates = [
            worker
            for worker in self.workers
            if worker.up and worker.bubbles and worker.index not in without and len(worker.tickets) < most(worker)
        ]
        if not candidates or deadline_s <= 0.0:
            return None
        return min(candidates, key=lambda worker: len(worker.tickets))

    def done(self, ticket: Ticket, *, answered: bool = False) -> None:
        """Remove the ticket of a request that was answered or abandoned."""
        self._count_others()
        worker = self.workers[ticket.worker]
        worker.end(ticket, self._clock(), answered=answered)
        self._changed(worker)

    def close(self) -> None:
        """Withdraw this controller's published work."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _changed(self, worker: Worker) -> None:
        self._update(worker)
        self._publish(worker)

    def _publish(self, *workers: Worker) -> None:
        if self._peers is not None:
            now_s = self._clock()
            self._published.update({worker.key: PlacedWork(worker.left_s(now_s), worker.done_s) for worker in workers})
            self._peers.publish(self._published)

    def _count_others(self) -> bool:
        """Update the workers on which other controllers have placed or finished work. Return True if there are any."""
        others = self._peers.work() if self._peers is not None else {}
        if others == self._others:
            return False
        self._others = others
        for worker in self.workers:
            if (work := others.get(worker.key, NONE)) != worker.others:
                worker.others = work
                self._update(worker)
        return True

    def set_up(self, worker: Worker, up: bool) -> None:
        """Set whether the worker is up. Only workers that are up get requests."""
        if up:
            worker.heard_s = self._clock()
        if worker.up != up:
            worker.up = up
            self._update(worker)

    def _update(self, worker: Worker) -> None:
        is_guess = worker.learning and self._has_known
        if not worker.up or is_guess or len(worker.tickets) >= self._settings.max_queue:
            self._placement.remove(worker.index)
        else:
            self._placement.set(worker.index, worker.pattern, worker.free_s(self._clock()))

    def _slowest(self) -> PromptWork:
        """Return the cost of prompts on the slowest worker, or stage of one, with a trusted cost model."""
        most = self._prefill.max_tokens
        known = [worker for worker in self.workers if not worker.learning] or self.workers
        costs = [cost for worker in known for cost in worker.costs]
        works = [PromptWork.of(cost, gap_s=GAP_S, chunk_tokens=most, max_tokens=most) for cost in costs]
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
