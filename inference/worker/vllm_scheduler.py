"""vLLM's scheduler with a gate before it: `--scheduler-cls weft.inference.worker.vllm_scheduler.BubbleScheduler`.

Everything that decides *what* is computed stays vLLM's: order, chunking, prefix cache,
preemption, connectors. The gate decides *how much* of it now, and blocks the engine's loop
while that is nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from weft.inference.board.common_bubbles import Opening
from weft.inference.board.reader import BoardReader
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.worker.gate import Gate, Waker
from weft.inference.worker.settings import WorkerSettings
from weft.inference.worker.status import WorkerStatus
from weft.inference.worker.vllm_interfaces import call_when_serving

logger = init_logger(f"vllm.{__name__}")

CHORES_S = 0.05
"""Pause between steps without tokens outside of bubbles: the connector's notices, ended requests."""
IDLE_S = 0.5
"""Pause between looks at a closed gate."""
SAVE_S = 10.0
"""Pause between writes of the cost model."""
LOOKED_UP = 8
"""Waiting requests, in order, that the prefix cache is asked about before each grant."""
COMPLAIN_S = 30.0
"""Pause between log lines about a board that grants nothing."""


class BubbleScheduler(Scheduler):
    """Schedules prefills into the bubbles of a training pipeline."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; settings come in `--additional-config`, see `WorkerSettings`.

        Raises:
            ValueError: settings are missing, or vLLM was started with what cannot work in bubbles.
        """
        super().__init__(vllm_config, *args, **kwargs)
        if vllm_config.scheduler_config.async_scheduling:
            raise ValueError(
                "async_scheduling=True: a step would be granted while the one before it runs; "
                "start with --no-async-scheduling"
            )
        if not vllm_config.scheduler_config.enable_chunked_prefill:
            raise ValueError("enable_chunked_prefill=False: prompts could not be split over bubbles; leave it on")
        if vllm_config.parallel_config.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={vllm_config.parallel_config.data_parallel_size}: its engines step together, also "
                "outside of bubbles; start one worker per rank instead"
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size={vllm_config.parallel_config.pipeline_parallel_size}: a step would be granted "
                "while others are still on their way through the stages; span ranks with "
                "inference.prefill.ranks_per_worker instead"
            )
        self._settings = settings = WorkerSettings.of(vllm_config.additional_config)
        self._cost_file = Path(settings.cost_file)
        try:
            cost = PrefillCost.load(self._cost_file, quantile=settings.quantile)
        except ValueError as error:
            logger.warning("%s; learning anew", error)
            cost = PrefillCost(quantile=settings.quantile)
        boards = [BoardReader(board) for board in settings.boards]
        self._gate = Gate(boards, cost, guard_s=settings.guard_s)
        self._most_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._status = WorkerStatus(Path(settings.status_file) if settings.status_file else None)
        self._waker: Waker | None = None
        self._granted: tuple[int, Opening | None] = (0, None)
        self._started_s = 0.0
        self._chored_s = self._saved_s = self._complained_s = 0.0
        self._trace: TextIO | None = None
        if settings.trace_file:
            self._trace = open(settings.trace_file, "a", buffering=1)  # noqa: SIM115

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Let the engine's loop block while the gate is closed; ``wake`` ends its wait."""
        # Without a connector there are no chores to wake for, only boards that come and go.
        period_s = IDLE_S if self.connector is None else CHORES_S
        self._waker = Waker(self._gate, wake, period_s=period_s, status=self._status)

    def add_request(self, request: Request) -> None:
        """Take a request; without `allow_decode` it ends with its first token."""
        if not self._settings.allow_decode:
            request.max_tokens = min(request.max_tokens, 1)
        super().add_request(request)

    def has_requests(self) -> bool:
        """Whether a step is to run now: tokens that fit the bubble, or chores that are due."""
        pending = super().has_requests()
        self._status.passed()
        if self._waker is not None:
            self._waker.arm(pending)
        if not pending:
            return False
        self._granted = self._gate.grant(*self._wanted())
        if self._gate.why_not and time.monotonic() - self._complained_s > COMPLAIN_S:
            self._complained_s = time.monotonic()
            logger.warning("%d requests wait and nothing is granted: %s", len(self.requests), self._gate.why_not)
        return self._granted[0] > 0 or self._chores_due()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's step within the tokens that the gate grants now."""
        self._started_s = self._chored_s = time.monotonic()
        self.max_num_scheduled_tokens = self._granted[0]
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = self._most_tokens
            self._granted = (0, self._granted[1])

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """vLLM's, after the gate has learnt how long the step took."""
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens:
            self._learn(scheduler_output, time.monotonic())
        return super().update_from_output(scheduler_output, model_runner_output)

    def shutdown(self) -> None:
        """vLLM's, and keep what was learnt."""
        self._save()
        super().shutdown()

    def _wanted(self) -> tuple[int, int]:
        """Tokens that could be computed now, and the longest context that any of them attend to.

        Of requests that wait, what the prefix cache holds counts as context: it is not computed
        again, but attended to.
        """
        wanted, context = 0, 0
        for request in self.running:
            wanted += request.num_tokens - request.num_computed_tokens
            context = max(context, request.num_computed_tokens)
        waiting = chain(self.kv_holding_waiting, self.waiting)
        for number, request in enumerate(waiting):
            if wanted >= self._most_tokens:
                break
            known = request.num_computed_tokens
            if not known and number < LOOKED_UP:
                known = self.kv_cache_manager.get_computed_blocks(request)[1]
            wanted += request.num_tokens - known
            context = max(context, known)
        return min(wanted, self._most_tokens), context

    def _chores_due(self) -> bool:
        """Whether the connector or the model runner has to be told something, outside of bubbles."""
        if not (self.has_finished_requests() or self.connector is not None):
            return False
        return time.monotonic() - self._chored_s >= CHORES_S

    def _learn(self, output: SchedulerOutput, end_s: float) -> None:
        tokens = output.total_num_scheduled_tokens
        # Attention's work is the sum over requests; as one chunk it is that of this context.
        pairs = 0.0
        for request_id, count in output.num_scheduled_tokens.items():
            if (request := self.requests.get(request_id)) is None:  # aborted meanwhile
                continue
            computed = request.num_computed_tokens - count
            pairs += count * computed + count * count / 2
        context = max(0.0, pairs / tokens - tokens / 2)
        late_s = self._gate.ended(self._started_s, end_s, tokens, context)
        if end_s - self._saved_s > SAVE_S or self._gate.cost.steps == TRUSTED:
            self._save()
        if self._trace is not None:
            self._note(output, end_s, late_s)

    def _note(self, output: SchedulerOutput, end_s: float, late_s: float) -> None:
        assert self._trace is not None
        found = self._granted[1]
        record = {
            "start_s": self._started_s,
            "end_s": end_s,
            "closes_s": found.closes_s if found else 0.0,
            "step": found.step if found else 0,
            "bubble": found.index if found else 0,
            "late_s": late_s,
            "tokens": output.num_scheduled_tokens,
        }
        self._trace.write(json.dumps(record) + "\n")

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        try:
            self._gate.cost.save(self._cost_file)
        except OSError as error:
            logger.warning("the cost model is not kept: %s", error)


def _attach(scheduler: Any, wake: Callable[[], None]) -> None:
    if isinstance(scheduler, BubbleScheduler):
        scheduler.wake_by(wake)


call_when_serving(_attach)
