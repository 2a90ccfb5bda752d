"""The controller's view of one worker: its bubbles, its cost model, its speed, and its remaining work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from weft.conf.schema import PrefillWorkerConfig
from weft.inference.controller.peers import NONE
from weft.inference.controller.slowdown import SAMPLE_S, Slowdown
from weft.inference.placement.bubble_pattern import BubblePattern
from weft.inference.placement.chain import HOP_S
from weft.inference.placement.chain_pattern import Spans, chain_pattern
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.worker.command import stage_file

QUIET_S = 5.0
"""Seconds that a board may predict nothing before its trainer is considered ended: on a busy host, or while it
loads or saves, a trainer may pause its heartbeats."""
LEAST_LEFT = 0.05
"""Share of a prompt that counts as left however long it runs: it may end at any moment."""


class Bubbles(Protocol):
    """Source of a worker's predicted bubbles, such as `CommonBubbles`."""

    def upcoming(self, horizon_s: float) -> Sequence[tuple[float, float]] | None:
        """Return the bubbles within the next ``horizon_s``: (start, end) on the monotonic clock, in order.

        The result is None if training has ended, and empty if no bubbles are published at the moment.
        """
        ...


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A request placed on a worker. Seconds of the monotonic clock.

    Attributes:
        work_s: predicted seconds of work.
        expected_s: when it is expected to end.
        passed_s: `Worker.passed_s` when the request was placed.
        queued_s: when it was placed, the predicted work until its end in seconds, without slowdown.
        slowdown: `Slowdown.last` when it was placed.
        waited: True if other requests were placed before it and had not ended.
        others_done_s: when it was placed, the work that other controllers had completed on the worker.
    """

    worker: int
    work_s: float
    placed_s: float
    expected_s: float
    passed_s: float
    queued_s: float
    slowdown: float
    waited: bool
    others_done_s: float


class Worker:
    """A prefill worker."""

    def __init__(self, index: int, address: PrefillWorkerConfig, boards: Sequence[Bubbles]) -> None:
        self.index = index
        self.url, self.decode_url = address.url.rstrip("/"), address.decode_url.rstrip("/")
        self.is_remote = not address.boards
        """True if it is on another host, and reports its bubbles and costs."""
        self.key = ",".join(map(os.path.abspath, address.boards)) or self.url
        """Identifies the worker among controllers, which may use different URLs."""
        self.boards = boards
        self.up = False
        self.problem = ""
        """Why its last report could not be used, or empty."""
        self.heard_s = -inf
        """Time of its last response."""
        self.slowdown = Slowdown()
        self.tickets: list[Ticket] = []
        self.bubbles: Sequence[tuple[float, float]] = ()
        """Bubbles of its first stage, or none if another stage has none."""
        self._later: Sequence[Sequence[tuple[float, float]]] = ()
        self.bubble_s = 0.0
        """Total length of past bubbles."""
        self.pattern = BubblePattern([], 1.0)
        """Bubbles from the last `refresh` on."""
        self.done_s = 0.0
        """Work of all prompts that it has answered here."""
        self.others = NONE
        """Work that other controllers have placed on it."""
        self.sent_s = -inf
        """When the caches of its prompts are expected to have arrived at a decode server at another site."""
        self._past_s = 0.0
        self._free_passed_s = self._others_done_s = 0.0
        """`passed_s` and the others' work done at the end of the last ticket."""
        self._refreshed_s = inf
        cost_files = [stage_file(Path(address.cost), stage) for stage in range(address.stages)]
        self._cost_files = cost_files if address.cost else []
        self._cost_stamps = [0.0] * address.stages
        self._published_s = -inf
        self.costs = [PrefillCost() for _ in range(address.stages)]
        """Cost model of each stage."""

    def refresh(self, now_s: float, horizon_s: float, quantile: float) -> None:
        """Read its board and its cost model."""
        self._past_s = self.passed_s(now_s)
        self.bubble_s += sum(
            max(0.0, min(end_s, now_s) - max(start_s, self._refreshed_s)) for start_s, end_s in self.bubbles
        )
        self._refreshed_s = now_s
        self.update_bubbles([board.upcoming(horizon_s) for board in self.boards], now_s)
        self.reload_cost(quantile)

    def update_bubbles(self, stages: Sequence[Spans | None], now_s: float) -> None:
        """Update the predicted bubbles. If a stage has none, the previous ones remain valid for a moment.

        Args:
            stages: bubbles of each stage; None if its training has ended.
        """
        first, *later = stages
        has_ended = any(spans is None for spans in stages)
        if all(stages):
            self._published_s = now_s
        if all(stages) or has_ended or now_s - self._published_s > QUIET_S:
            self.bubbles = first or [] if all(stages) else []
            self._later = [spans or [] for spans in later]

    def set_pattern(self, horizon_s: float, *, overhead_s: float, guard_s: float) -> None:
        """Repeat the predicted bubbles of the last `refresh` periodically. See `BubblePattern`."""
        now_s = self._refreshed_s
        first, *later = [
            [
                (max(0.0, start_s - now_s), min(horizon_s, end_s - now_s))
                for start_s, end_s in spans
                if max(start_s, now_s) < min(end_s, now_s + horizon_s)
            ]
            for spans in (self.bubbles, *self._later)
        ]
        make = partial(chain_pattern, [first, *later], hop_s=HOP_S) if later else partial(BubblePattern, first)
        self.pattern = make(period_s=horizon_s, origin_s=now_s, overhead_s=overhead_s, guard_s=guard_s)

    def reload_cost(self, quantile: float) -> None:
        """Reload the worker's cost models if their files have changed."""
        for stage, file in enumerate(self._cost_files):
            try:
                stamp = os.stat(file).st_mtime
                if stamp != self._cost_stamps[stage]:
                    self.costs[stage], self._cost_stamps[stage] = PrefillCost.load(file, quantile=quantile), stamp
            except (OSError, ValueError):
                continue  # not written yet, or by another version: keep the current one

    @property
    def learning(self) -> bool:
        """True if a cost model of it has seen too few steps to refuse requests by it."""
        has_costs = self.is_remote or bool(self._cost_files)
        return has_costs and any(cost.steps < TRUSTED for cost in self.costs)

    @property
    def spacing_s(self) -> float:
        """Mean seconds between the starts of its bubbles, or inf if it has fewer than two."""
        starts_s = [start_s for start_s, _ in self.bubbles]
        return (starts_s[-1] - starts_s[0]) / (len(starts_s) - 1) if len(starts_s) > 1 else inf

    def passed_s(self, now_s: float) -> float:
        """Return the seconds of work that fitted into its bubbles so far, at the predicted speed."""
        if not self.pattern.capacity_s:
            return self._past_s
        return self._past_s + self.pattern.position(now_s) - self.pattern.position(self._refreshed_s)

    def left_s(self, now_s: float) -> float:
        """Return the estimated seconds of work left in the tickets of this controller.

        A worker computes prompts in their order, so even if the first one is late, the work of the others remains.
        """
        if not self.tickets:
            return 0.0
        first = self.tickets[0]
        begun_s = max(first.passed_s, self._free_passed_s)
        ran_s = (self.passed_s(now_s) - begun_s) / self.slowdown.factor(now_s)
        if self.others.left_s > 0.0:  # it may have run prompts of other controllers
            ran_s = 0.0
        left_s = min(first.work_s, max(first.work_s - ran_s, LEAST_LEFT * first.work_s))
        return left_s + sum(ticket.work_s for ticket in self.tickets[1:])

    def free_s(self, now_s: float) -> float:
        """Return when it is expected to be able to begin other work."""
        left_s = self.left_s(now_s) + self.others.left_s
        return self.pattern.free(now_s, left_s * self.slowdown.factor(now_s)) if left_s else now_s

    def end_s(self, now_s: float, free_s: float, work_s: float) -> float:
        """Return when work that begins at ``free_s`` or later ends, at the worker's recent speed."""
        return self.pattern.end(free_s, work_s * self.slowdown.factor(now_s)) if work_s else free_s

    def latest_s(self, now_s: float, work_s: float = 0.0) -> float:
        """Return a time that its current work and ``work_s`` more rarely exceed."""
        left_s = self.left_s(now_s) + self.others.left_s + work_s
        return self.pattern.end(now_s, left_s * self.slowdown.bound(now_s)) if left_s else now_s

    def arrival_s(self, end_s: float, cache_s: float) -> float:
        """Return when a prompt's cache arrives at another site, after those before it; its prefill ends at ``end_s``.

        Args:
            cache_s: seconds that it takes alone.
        """
        return max(end_s, self.sent_s) + cache_s

    def waits(self) -> bool:
        """True if a prompt would wait behind others."""
        return bool(self.tickets) or self.others.left_s > 0.0

    def take(self, now_s: float, work_s: float, expected_s: float) -> Ticket:
        """Add a ticket for a request that was placed on this worker, and return it."""
        ticket = Ticket(
            worker=self.index,
            work_s=work_s,
            placed_s=now_s,
            expected_s=expected_s,
            passed_s=self.passed_s(now_s),
            queued_s=self.left_s(now_s) + self.others.left_s + work_s,
            slowdown=self.slowdown.last(now_s),
            waited=self.waits(),
            others_done_s=self.others.done_s,
        )
        self.tickets.append(ticket)
        return ticket

    def end(self, ticket: Ticket, now_s: float, *, answered: bool) -> None:
        """Remove a ticket. If it was answered, learn the worker's speed from it.

        Its work ran since the previous ticket ended, together with prompts of other controllers. A short prompt on an
        idle worker is ignored, because most of its time was the wait for a bubble.
        """
        self.tickets.remove(ticket)
        passed_s = self.passed_s(now_s)
        if answered:
            begun_s = max(ticket.passed_s, self._free_passed_s)
            others_s = self.others.done_s - max(ticket.others_done_s, self._others_done_s)
            if not self.learning and (ticket.waited or ticket.work_s >= SAMPLE_S):
                self.slowdown.learn(now_s, max(0.0, passed_s - begun_s), ticket.work_s + max(0.0, others_s))
            if not self.learning:
                self.slowdown.compare(now_s, passed_s - ticket.passed_s, ticket.queued_s, ticket.slowdown)
            self.done_s += ticket.work_s
        self._free_passed_s, self._others_done_s = passed_s, self.others.done_s
