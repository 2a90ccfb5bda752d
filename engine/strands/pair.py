"""A strand pair: a forward and a backward in two threads, one at a time."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from weft.conf.host.threads import Thread
from weft.engine.strands.pair_scheduler import OtherStrandFailed, PairScheduler
from weft.engine.strands.yielding_group import YieldPoint
from weft.pipeline.strands.plan import SegmentPlan, Step

Result = TypeVar("Result")
Other = TypeVar("Other")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairRunner:
    """Runs pairs on one rank.

    Attributes:
        thread: runs backwards. Forwards run in the caller's thread.
        yield_point: callbacks that the axis groups of both strands call. See `YieldingGroup`.
        strict: whether to raise an error if the strands have other numbers of segments than the plan. Otherwise they
            run by the rules of `PairScheduler`, and a warning is logged once for each plan.
    """

    thread: StrandThread
    yield_point: YieldPoint
    strict: bool = False
    _reported: set[SegmentPlan] = field(default_factory=set)

    def run(
        self,
        plan: SegmentPlan,
        forward: Callable[[], Result],
        backward: Callable[[], Other],
        play_weight: Callable[[], object] = lambda: None,
    ) -> tuple[Result, Other]:
        """Run a forward and a backward, interleaved.

        Args:
            plan: order of segments. If it has no steps, the strands alternate.
            play_weight: computes the backward's next deferred weight gradient, if one is ready.

        Returns:
            The results of ``forward`` and ``backward``.

        Raises:
            Exception: the first error of either strand, after both have ended.
            RuntimeError: the numbers of segments differ from the plan's, and the runner is strict.
        """
        scheduler = PairScheduler(plan, play_weight)
        future = self.thread.start(partial(self._strand, scheduler, Step.backward, backward))
        errors: list[BaseException] = []
        try:
            result = self._strand(scheduler, Step.forward, forward)
        except BaseException as error:
            errors.append(error)
        if (other := future.exception()) is not None:
            errors.append(other)
        if errors:
            raise min(errors, key=lambda raised: isinstance(raised, OtherStrandFailed))
        scheduler.settle()
        self._compare(plan, scheduler)
        return result, future.result()

    def _strand(self, scheduler: PairScheduler, strand: Step, body: Callable[[], Result]) -> Result:
        try:
            scheduler.begin(strand)
            with self.yield_point.taken(partial(scheduler.pause, strand)):
                result = body()
            scheduler.end(strand)
        except BaseException as error:
            scheduler.fail(error)
            raise
        return result

    def _compare(self, plan: SegmentPlan, scheduler: PairScheduler) -> None:
        """Compare the numbers of segments with the plan's, and raise an error or log a warning if they differ."""
        planned = {strand: plan.steps.count(strand) for strand in scheduler.segments}
        if not plan.steps or planned == scheduler.segments:
            return
        counts = ", ".join(
            f"the {strand.name} {scheduler.segments[strand]} where {count} are planned"
            for strand, count in planned.items()
        )
        message = f"a strand pair has other segments than its plan: {counts}; the plan was made for another model"
        if self.strict:
            raise RuntimeError(message)
        if plan not in self._reported:
            self._reported.add(plan)
            _log.warning("%s, and hides less of the communication than it could", message)


CLOSING_S = 5.0
"""Timeout of `StrandThread.close` in seconds, because the thread may wait for a lost rank."""


class StrandThread:
    """A thread that runs functions one after the other.

    Autograd's own threads are disabled in it. On a GPU all backwards would share autograd's thread for the device, and
    a strand that waits there would block the others.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the thread. ``device`` is that of the jobs' tensors, and the current device of the caller."""
        self._device = device
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = Thread(self._run, name="weft strand")
        self._thread.start()

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """Start to run ``job`` on the caller's current stream, and return the future of its result.

        Both strands then compute, allocate and free on one stream, so that memory is reused without
        synchronisation. Collectives have streams of their own.
        """
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        future: Future[Result] = Future()

        def run() -> None:
            try:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    result = job()
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        """End the thread. If it waits for a lost rank, it ends later, when its process group is aborted."""
        self._jobs.put(None)
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            while (job := self._jobs.get()) is not None:
                job()
                del job  # an idle thread keeps no tensors
