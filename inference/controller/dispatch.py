"""The dispatch: a prompt's way to a worker and back, and which workers are alive.

Slow is not dead. A worker that takes longer than was predicted keeps its prompts for as long as it
answers when it is asked how it is; one that refuses connections, or has said nothing for
`inference.controller.silence_s`, is down, and its prompts go to the next best.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import httpx

from weft.conf.schema import ControllerConfig
from weft.inference.controller.fleet import Fleet, Ticket, Worker
from weft.inference.controller.metrics import Metrics
from weft.inference.requests import Refusal

logger = logging.getLogger(__name__)

MOST_TRIES = 2
"""Workers that a prompt may fail on: what kills or breaks two may break all of them."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a worker is asked.

    Attributes:
        path: of the worker's API.
        body: passed on as it came.
        headers: of the caller's, those that the worker gets.
        tokens: of the prompt.
        deadline_s: seconds from now in which the first token has to be predicted.
    """

    path: str
    body: bytes
    headers: Mapping[str, str]
    tokens: int
    deadline_s: float


class Dispatch:
    """Prompts on their way, and the look at each worker that goes on meanwhile."""

    def __init__(self, fleet: Fleet, settings: ControllerConfig, metrics: Metrics, client: httpx.AsyncClient) -> None:
        """Reach the workers of ``fleet`` by ``client``."""
        self._fleet, self._settings, self._metrics, self._client = fleet, settings, metrics, client

    async def look(self) -> None:
        """See once which workers answer, and read their bubbles."""
        await asyncio.gather(*map(self.probe, self._fleet.workers))
        self._fleet.refresh()

    async def watch(self) -> None:
        """Look again and again; a worker that is slow to answer delays no other's look."""
        async with asyncio.TaskGroup() as group:
            for worker in self._fleet.workers:
                group.create_task(self._again_and_again(partial(self.probe, worker)))
            group.create_task(self._again_and_again(self._refresh))

    async def _refresh(self) -> None:
        self._fleet.refresh()

    async def _again_and_again(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_s)
            try:
                await act()
            except Exception:  # whatever it was, the next look may find it mended
                logger.exception("the look at the workers failed; again in %g s", self._settings.probe_s)

    async def probe(self, worker: Worker) -> None:
        """Ask a worker how it is."""
        timeout_s = min(self._settings.silence_s, max(1.0, self._settings.probe_s))
        try:
            found = await self._client.get(f"{worker.url}/health", timeout=timeout_s)
        except httpx.ConnectError:
            self._fleet.set_up(worker, False)
        except httpx.TransportError:  # slow, or it closed a connection that it held idle; dead, it refuses the next one
            if time.monotonic() - worker.heard_s > self._settings.silence_s:
                self._fleet.set_up(worker, False)
        else:
            self._fleet.set_up(worker, found.is_success)

    async def prefill(self, asked: Asked) -> tuple[httpx.Response, Ticket]:
        """Have a prompt prefilled: by the best worker, and if that fails by the next best.

        Raises:
            Refusal: no worker would end it in time, or two have failed on it.
        """
        begun_s, failed = time.monotonic(), set[int]()
        while True:
            ticket = self._fleet.place(asked.tokens, asked.deadline_s - (time.monotonic() - begun_s), without=failed)
            self._metrics.granted(ticket)
            worker = self._fleet.workers[ticket.worker]
            try:
                found = await self._ask(worker, asked, ticket)
            except httpx.ConnectError:  # it has not seen the prompt
                self._fleet.set_up(worker, False)
                self._metrics.moved(ticket)
                continue
            except httpx.TransportError:
                found = None
            finally:
                self._fleet.done(ticket)
            if found is not None and found.status_code < 500:
                self._fleet.learn_pace(ticket)
                self._metrics.answered(ticket, time.monotonic())
                return found, ticket
            failed.add(worker.index)
            await self.probe(worker)  # the prompt may be at fault as well as the worker
            if len(failed) == MOST_TRIES or (found is not None and len(failed) == len(self._fleet.workers)):
                if found is not None:
                    return found, ticket
                raise Refusal(
                    502,
                    f"{len(failed)} workers stopped answering while they had this prompt, and it is not tried on "
                    "another; see their logs before it is sent again",
                )
            self._metrics.moved(ticket)

    async def _ask(self, worker: Worker, asked: Asked, ticket: Ticket) -> httpx.Response:
        """The worker's answer, however long it takes while the worker lives and has bubbles ahead.

        Raises:
            Refusal: training has ended meanwhile, or it took longer than anyone should wait.
            httpx.TransportError: it is dead or hung.
        """
        settings = self._settings
        timeout = httpx.Timeout(None, connect=settings.silence_s)
        post = self._client.post(
            f"{worker.url}{asked.path}", content=asked.body, headers=asked.headers, timeout=timeout
        )
        answer = asyncio.create_task(post)
        patience_s = max(0.0, ticket.expected_s - time.monotonic())
        try:
            while True:
                await asyncio.wait((answer,), timeout=patience_s + settings.answer_slack_s)
                if answer.done():
                    worker.heard_s = time.monotonic()
                    return answer.result()
                await self._check_patience(worker, ticket)
                patience_s = 0.0
        finally:
            answer.cancel()

    async def _check_patience(self, worker: Worker, ticket: Ticket) -> None:
        if time.monotonic() - worker.heard_s > self._settings.answer_slack_s:  # else another look has just been
            await self.probe(worker)
        if not worker.up:
            raise httpx.ReadTimeout("it does not answer when asked how it is either")
        waited_s = time.monotonic() - ticket.placed_s
        if not worker.bubbles:
            raise Refusal(
                503, f"training has published no bubbles for a while; {waited_s:.0f} s waited", retry_after_s=1
            )
        if waited_s > self._settings.answer_timeout_s:
            raise Refusal(504, f"no answer after {waited_s:.0f} s (inference.controller.answer_timeout_s)")
