"""vLLM's scheduler with the gate's budget: `--scheduler-cls weft.inference.worker.vllm_scheduler.BubbleScheduler`.

vLLM decides *what* is computed: order, chunking, prefix cache, preemption, connectors. The gate
decides *how many* tokens now, and blocks the engine's loop while it grants none.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, TextIO

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from weft.conf.host.files import replacing
from weft.inference.board.common_bubbles import Opening
from weft.inference.board.reader import BoardReader
from weft.inference.placement.prefill_cost import TRUSTED, PrefillCost
from weft.inference.worker.chain_gate import ChainGate
from weft.inference.worker.chunk_recorder import ChunkRecorder
from weft.inference.worker.command import cost_link, stage_file
from weft.inference.worker.fair_order import FairOrder
from weft.inference.worker.gate import Gate, Span, Waker
from weft.inference.worker.settings import WorkerSettings
from weft.inference.worker.status import WorkerStatus
from weft.inference.worker.vllm_cpu import keep_base_prompts, keep_generators
from weft.inference.worker.vllm_interfaces import (
    PREDICTED,
    SPANS,
    call_when_serving,
    computes_in_process,
    make_readers_block,
)
from weft.inference.worker.vllm_warm_up import warm_up

logger = init_logger(f"vllm.{__name__}")

CHORES_S = 0.05
"""Interval of steps without tokens outside of bubbles: connector notifications, finished requests."""
IDLE_S = 0.5
"""Polling interval while the gate is closed."""
SAVE_S = 10.0
"""Interval between writes of the cost model."""
MAX_LOOKUPS = 8
"""Maximum number of waiting requests looked up in the prefix cache before each grant."""
WARNING_S = 30.0
"""Interval between warnings that nothing is granted."""
MAX_IN_FLIGHT = 4
"""Maximum number of steps in a pipeline's stages: vLLM's queue to them holds ten messages, and a step has two."""


@dataclass(frozen=True)
class _Step:
    """A step with tokens whose result is awaited.

    Attributes:
        opening: the bubble in which it began, or None outside of bubbles.
        is_gated: False in the warm-up, and after the end of training.
        learns: True if the gates learn from it.
    """

    started_s: float
    started_cpu_s: float
    opening: Opening | None
    is_gated: bool
    learns: bool


class BubbleScheduler(Scheduler):
    """Schedules prefills into the bubbles of a training pipeline."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Create the scheduler with the settings in `--additional-config`. See `WorkerSettings`.

        Raises:
            ValueError: settings are missing, or vLLM has incompatible arguments.
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
        self._settings = settings = WorkerSettings.of(vllm_config.additional_config)
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages != settings.stages:
            raise ValueError(
                f"pipeline_parallel_size={stages}: {settings.stages} stages have a gate; set inference.prefill.stages"
            )
        self._cost_files = [stage_file(Path(settings.cost_file), stage) for stage in range(stages)]
        costs = [PrefillCost.load_or_set_aside(file, quantile=settings.quantile) for file in self._cost_files]
        self._boards = boards = [BoardReader(board) for board in settings.boards]
        each = len(boards) // stages
        self._gate = ChainGate(
            [
                Gate(boards[stage * each : (stage + 1) * each], cost, guard_s=settings.guard_s)
                for stage, cost in enumerate(costs)
            ]
        )
        self._steps: deque[_Step] = deque()
        self._most_in_flight = min(stages, MAX_IN_FLIGHT)
        self._most_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._status = WorkerStatus(Path(settings.status_file) if settings.status_file else None, stages)
        if settings.status_file:
            for stage, file in enumerate(self._cost_files):
                with replacing(stage_file(cost_link(Path(settings.status_file)), stage)) as draft:
                    draft.symlink_to(file)
        self._waker: Waker | None = None
        self._granted: tuple[int, Opening | None] = (0, None)
        self._ungated, self._learns, self._is_free = 0, True, False
        self._order = FairOrder()
        self._in_process = False
        self._last_chores_s = self._saved_s = self._warned_s = 0.0
        self._recorder = ChunkRecorder(settings.rings, settings.ranks, stages)
        self._trace: TextIO | None = None
        if settings.trace_file:
            self._trace = open(settings.trace_file, "a", buffering=1)  # noqa: SIM115

    def attach(self, engine: Any, wake: Callable[[], None]) -> None:
        """Prepare an engine whose loop begins, and let it block while the gate is closed. ``wake`` unblocks it."""
        self._in_process = computes_in_process(engine)
        if self._settings.stages > 1:
            make_readers_block()
        warm_up(engine)
        self._status.serve()
        # Without a connector there are no chores, and only boards that appear and disappear have to be noticed.
        period_s = IDLE_S if self.connector is None else CHORES_S
        self._waker = Waker(self._gate.gates[0], wake, period_s=period_s, status=self._status)

    @contextlib.contextmanager
    def ungated(self, tokens: int, *, learn: bool = False) -> Iterator[None]:
        """Grant ``tokens`` to every step of the block, even outside of bubbles. For `warm_up`.

        Args:
            learn: the cost model learns from these steps.
        """
        self._ungated, self._learns = tokens, learn
        try:
            yield
        finally:
            self._ungated, self._learns = 0, True

    def add_request(self, request: Request) -> None:
        """Add a request to the queue in fair order. Without `allow_decode` it finishes with its first token."""
        if not self._settings.allow_decode:
            request.max_tokens = min(request.max_tokens, 1)
        super().add_request(request)
        if self.policy is SchedulingPolicy.FCFS:
            self._order.place(request, self.waiting)

    def has_requests(self) -> bool:
        """True if a step must run now: for tokens that fit into the bubble, or for chores."""
        pending = super().has_requests()
        self._is_free = self._settings.outlives_training and all(board.ended for board in self._boards)
        if ungated := self._ungated or (self._is_free and self._most_tokens):
            self._granted = ungated, None
            return pending
        self._status.looped()
        if not pending or len(self._steps) >= self._most_in_flight:  # then the loop waits for the oldest step
            self._arm(False)
            return False
        self._arm(True)
        self._granted = self._gate.grant(*self._wanted())
        if self._gate.why_not and time.monotonic() - self._warned_s > WARNING_S:
            self._warned_s = time.monotonic()
            logger.warning("%d requests are waiting and nothing is granted: %s", len(self.requests), self._gate.why_not)
        return self._granted[0] > 0 or self._chores_due()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule as vLLM does, limited to the tokens granted now."""
        self._last_chores_s = time.monotonic()
        begun = self._last_chores_s, time.thread_time()
        self.max_num_scheduled_tokens = self._granted[0]
        try:
            output = super().schedule(throttle_prefills)
            for request in output.scheduled_new_reqs:
                self._order.began(request.req_id)
            if output.total_num_scheduled_tokens:
                self._began(output, *begun)
            return output
        finally:
            self.max_num_scheduled_tokens = self._most_tokens
            self._granted = (0, self._granted[1])

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Let the gates learn from the step's duration, then update as vLLM does."""
        if scheduler_output.total_num_scheduled_tokens:
            self._ended(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        """Finish requests as vLLM does. If all are aborted, publish that the engine shuts down."""
        if request_ids is None and finished_status is RequestStatus.FINISHED_ABORTED:
            self._status.leave()
        return super().finish_requests(request_ids, finished_status)

    def shutdown(self) -> None:
        """Save the cost model and end the waker, then shut down as vLLM does."""
        self._save()
        if self._waker is not None:
            self._waker.close()
        super().shutdown()

    def _wanted(self) -> tuple[int, int]:
        """Return the number of pending tokens, and the longest context that any of them attends to.

        Tokens of waiting requests that are in the prefix cache count as context, because they are attended to, but not
        computed again.
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
            if not known and number < MAX_LOOKUPS:
                known = self.kv_cache_manager.get_computed_blocks(request)[1]
            wanted += request.num_tokens - known
            context = max(context, known)
        return min(wanted, self._most_tokens), context

    def _chores_due(self) -> bool:
        """True if a step without tokens is due for the connector or the model runner."""
        if self._steps or not (self.has_finished_requests() or self.connector is not None):
            return False
        return time.monotonic() - self._last_chores_s >= CHORES_S

    def _arm(self, has_work: bool) -> None:
        if self._waker is not None:
            self._waker.arm(has_work)

    def _began(self, output: SchedulerOutput, started_s: float, started_cpu_s: float) -> None:
        tokens = output.total_num_scheduled_tokens
        # The context with which one chunk of all tokens has as much attention work as all requests together.
        pairs = 0.0
        for request_id, count in output.num_scheduled_tokens.items():
            computed = self.requests[request_id].num_computed_tokens - count
            pairs += count * computed + count * count / 2
        context = max(0.0, pairs / tokens - tokens / 2)
        step = _Step(
            started_s,
            started_cpu_s,
            self._granted[1],
            is_gated=not (self._ungated or self._is_free),
            learns=self._learns and not self._is_free,
        )
        self._steps.append(step)
        if step.learns:
            self._gate.began(tokens, context, step.opening.closes_s if step.opening is not None else inf)
        if step.is_gated and self._gate.predicted_s:
            setattr(output, PREDICTED, self._gate.predicted_s)

    def _ended(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        step = self._steps.popleft()
        # If this thread computes, its CPU time excludes time in which it was preempted or stopped.
        computed_s = time.thread_time() - step.started_cpu_s if self._in_process else None
        end_s = time.monotonic()
        spans = getattr(result, SPANS, [(step.started_s, end_s, computed_s)])
        self._recorder.add(output.total_num_scheduled_tokens, spans)
        if not step.learns:
            return
        late_s = self._gate.ended(spans)
        if end_s - self._saved_s > SAVE_S or self._gate.gates[0].cost.steps == TRUSTED:
            self._save()
        if self._trace is not None and step.is_gated:
            self._log_step(output, step, spans, late_s)

    def _log_step(self, output: SchedulerOutput, step: _Step, spans: Sequence[Span], late_s: float) -> None:
        assert self._trace is not None
        found = step.opening
        record = {
            "start_s": spans[0][0],
            "end_s": spans[-1][1],
            "computed_s": spans[0][2],
            "closes_s": found.closes_s if found else 0.0,
            "step": found.step if found else 0,
            "bubble": found.index if found else 0,
            "late_s": late_s,
            "tokens": output.num_scheduled_tokens,
            "spans": [span[:2] for span in spans],
        }
        self._trace.write(json.dumps(record) + "\n")

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        try:
            for gate, file in zip(self._gate.gates, self._cost_files, strict=True):
                gate.cost.save(file)
        except OSError as error:
            logger.warning("cannot save the cost model: %s", error)


def _attach(engine: Any, wake: Callable[[], None]) -> None:
    if isinstance(engine.scheduler, BubbleScheduler):
        engine.scheduler.attach(engine, wake)


call_when_serving(_attach)
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    keep_generators(CPUModelRunner)
    keep_base_prompts()
