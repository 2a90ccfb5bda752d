"""Dispatch: sends prompts to workers, and probes which workers are alive.

A slow worker is not dead: it keeps its prompts as long as its health check answers. A worker that
refuses connections, or has not answered for `inference.controller.silence_s`, is down, and its
prompts are retried on the next best one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Never

from weft.conf.schema import ControllerConfig
from weft.inference.controller.fleet import Fleet
from weft.inference.controller.metrics import Metrics
from weft.inference.controller.reports import FRESH_S, ReportedBubbles, read_report
from weft.inference.controller.server_connections import Lost, ServerResponse, Servers, Unreachable
from weft.inference.controller.worker import Ticket, Worker
from weft.inference.requests import Completion, Refusal

logger = logging.getLogger(__name__)

MAX_FAILURES = 2
"""Number of workers that a prompt may fail on: a prompt that crashes two might crash all."""


@dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """A prefill request to a worker.

    Attributes:
        path: path in the worker's API.
        body: forwarded unchanged.
        headers: the client headers to forward.
        deadline_s: seconds from now within which the first token must be predicted.
    """

    path: str
    body: bytes
    headers: Mapping[str, str]
    tokens: int
    deadline_s: float


class Dispatch:
    """Requests in flight, and periodic health probes of all workers."""

    def __init__(
        self,
        fleet: Fleet,
        settings: ControllerConfig,
        metrics: Metrics,
        servers: Servers,
        *,
        server_key: str = "",
    ) -> None:
        self._fleet, self._settings, self._metrics, self._servers = fleet, settings, metrics, servers
        self._server_key = server_key
        self._due_s = inf
        """When the next `_refresh` is due."""

    @property
    def max_tokens(self) -> int:
        """Context length of the workers."""
        return self._fleet.max_tokens

    async def probe_all(self) -> None:
        """Probe all workers once, and read their bubbles."""
        await asyncio.gather(*map(self.probe, self._fleet.workers))
        self._fleet.refresh()

    async def watch(self, chore: Callable[[], None], *probes: Callable[[], Awaitable[None]]) -> None:
        """Probe periodically, each worker independently, and call ``chore`` and ``probes``."""
        self._due_s = time.monotonic() + self._settings.probe_s
        async with asyncio.TaskGroup() as group:
            for worker in self._fleet.workers:
                group.create_task(self._periodically(partial(self.probe, worker)))
            group.create_task(self._periodically(partial(self._refresh, chore)))
            for probe in probes:
                group.create_task(self._periodically(probe))

    async def _refresh(self, chore: Callable[[], None]) -> None:
        now_s = time.monotonic()
        late_s = max(0.0, now_s - self._due_s)
        self._due_s = now_s + self._settings.probe_s
        for worker in self._fleet.workers:  # it may have answered, and this process did not run
            worker.heard_s = min(now_s, worker.heard_s + late_s)
        self._fleet.refresh()
        chore()

    async def _periodically(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_s)
            try:
                await act()
            except Exception:  # the next round may succeed
                logger.exception("probing the servers failed; retrying in %g s", self._settings.probe_s)

    async def probe(self, worker: Worker) -> None:
        """Check a worker's health, and update whether it is up. Read the report of one on another host."""
        silence_s = min(self._settings.silence_s, FRESH_S if worker.is_remote else inf)
        silent_s = time.monotonic() - worker.heard_s
        timeout_s = min(silence_s, max(1.0, self._settings.probe_s, silence_s - silent_s))
        try:
            response = await self._servers.ask("GET", f"{worker.url}/health", total_s=timeout_s)
            if worker.is_remote and response.is_success:
                await self._read_report(worker, timeout_s)
        except Unreachable:
            self._fleet.set_up(worker, False)
        except Lost:  # slow. If dead it refuses the next one
            await asyncio.sleep(0.001)  # a `_refresh` that is due already corrects `heard_s` first
            if time.monotonic() - worker.heard_s > silence_s:
                self._fleet.set_up(worker, False)
        else:
            self._fleet.set_up(worker, response.is_success)

    async def _read_report(self, worker: Worker, timeout_s: float) -> None:
        try:
            report = await read_report(
                self._servers,
                worker.url,
                self._server_key,
                stages=len(worker.boards),
                quantile=self._fleet.quantile,
                horizon_s=self._fleet.horizon_s,
                timeout_s=timeout_s,
            )
        except ValueError as error:
            if worker.problem != str(error):
                logger.warning("no prompts for this worker, whose bubbles are unknown: %s", error)
            worker.problem = str(error)
            return
        worker.problem, worker.costs = "", report.costs
        for bubbles, spans in zip(worker.boards, report.stages, strict=True):
            assert isinstance(bubbles, ReportedBubbles)
            bubbles.update(spans)

    async def prefill(self, request: PrefillRequest) -> tuple[ServerResponse, Ticket]:
        """Prefill a prompt on the best worker, and on failure on the next best.

        Raises:
            Refusal: no worker would finish in time, or two workers failed on the prompt.
        """
        start_s, failed, leaving = time.monotonic(), set[int](), set[int]()
        while True:
            ticket = self._fleet.place(
                request.tokens, request.deadline_s - (time.monotonic() - start_s), without=failed | leaving
            )
            self._metrics.granted(ticket)
            worker = self._fleet.workers[ticket.worker]
            response, is_answer = None, False
            try:
                response = await self._send(worker, request, ticket)
                is_answer = response.is_success and not Completion().is_aborted(response.content)
            except Unreachable:  # the worker has not received the prompt
                self._fleet.set_up(worker, False)
                self._metrics.moved(ticket)
                continue
            except Lost:
                pass
            finally:
                self._fleet.done(ticket, answered=is_answer)
            if response is not None and response.is_client_error:  # an error in the request, which was not computed
                return response, ticket
            if response is not None and is_answer:
                self._metrics.answered(ticket, time.monotonic())
                return response, ticket
            if response is not None and (response.is_success or response.status == 503):
                leaving.add(worker.index)  # shuts down, or takes no prompts; the prompt is not the cause
                self._metrics.moved(ticket)
                continue
            failed.add(worker.index)
            await self.probe(worker)  # the cause may be the prompt or the worker
            if not worker.up:  # it has ended: as if it had not answered
                response = None
            if len(failed) == MAX_FAILURES or (response is not None and len(failed) == len(self._fleet.workers)):
                if response is not None:
                    return response, ticket
                raise Refusal(
                    502,
                    f"{len(failed)} workers stopped answering while processing this prompt, and it is not retried; "
                    "check their logs before sending it again",
                )
            self._metrics.moved(ticket)

    async def _send(self, worker: Worker, request: PrefillRequest, ticket: Ticket) -> ServerResponse:
        """Return the worker's response. Wait for it as long as the worker is healthy and has bubbles ahead."""
        url, connect_s = f"{worker.url}{request.path}", self._settings.silence_s
        post = self._servers.ask("POST", url, request.body, request.headers, connect_s=connect_s)
        answer, watching = asyncio.create_task(post), asyncio.create_task(self._watch(worker, ticket))
        try:
            await asyncio.wait((answer, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                watching.result()
            worker.heard_s = time.monotonic()
            return answer.result()
        finally:
            answer.cancel()
            watching.cancel()

    async def _watch(self, worker: Worker, ticket: Ticket) -> Never:
        """Raise an exception when a prompt need not be awaited any longer."""
        settings = self._settings
        check_s = ticket.expected_s + settings.answer_slack_s
        while True:
            left_s = check_s - time.monotonic()
            await asyncio.sleep(max(0.0, min(left_s, settings.probe_s)))
            if worker.is_remote and not worker.up:
                raise Unreachable("its site is cut off")  # the prompt is not the cause
            if not worker.bubbles:
                waited_s = time.monotonic() - ticket.placed_s
                raise Refusal(
                    503,
                    f"training has published no bubbles for a while, or has ended; waited {waited_s:.0f} s",
                    retry_after_s=1,
                )
            if left_s <= 0.0:
                await self._check_progress(worker, ticket)
                check_s = time.monotonic() + settings.answer_slack_s

    async def _check_progress(self, worker: Worker, ticket: Ticket) -> None:
        if time.monotonic() - worker.heard_s > self._settings.answer_slack_s:  # otherwise it was probed recently
            await self.probe(worker)
        if not worker.up:
            raise Lost("its health check does not answer either")
        waited_s = time.monotonic() - ticket.placed_s
        if waited_s > self._settings.answer_timeout_s:
            raise Refusal(504, f"no answer after {waited_s:.0f} s (inference.controller.answer_timeout_s)")
