"""The private interfaces of vLLM 0.32.0 that the prefill worker relies on, and the methods that it wraps.

`PRIVATE` is checked by tests/inference/vllm/test_contract.py against the installed vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from weft.conf.host.processes import USUAL_S, set_timer_slack

PREDICTED = "weft_predicted_s"
"""Attribute of a scheduler's output: predicted seconds of each stage. Without it no stage waits for a bubble."""
SPANS = "weft_spans"
"""Attribute of a step's result, and name among the hidden states: a `Span` of each stage."""

PRIVATE: dict[str, tuple[str, str]] = {
    "Scheduler.__init__": ("vllm_config", "its first argument; `additional_config` of it holds our settings"),
    "Scheduler.schedule": ("max_num_scheduled_tokens", "read at each call; 0 schedules nothing"),
    "Scheduler.has_requests": ("has_unfinished_requests", "whether the engine's loop steps or blocks"),
    "Scheduler.has_finished_requests": ("finished_req_ids", "finished requests to report to the model runner"),
    "Scheduler.add_request": ("requests", "called for each request before it is queued"),
    "Scheduler.update_from_output": ("model_runner_output", "called with a step's result"),
    "Scheduler.get_request_counts": ("running", "`running` and `waiting` hold requests"),
    "KVCacheManager.get_computed_blocks": (
        "find_longest_cache_hit",
        "a lookup; its second value is a number of tokens",
    ),
    "EngineCore.step": ("has_requests", "steps only if `has_requests` says so"),
    "EngineCore.__init__": ("request_block_hasher", "makes scheduler, executor and hasher"),
    "EngineCore.reset_prefix_cache": ("reset_prefix_cache", "forgets the prompts of the warm-up"),
    "GPUModelRunner._sample": ("sampling_metadata", "samples for all requests, with `input_batch.generators`"),
    "GPUModelRunner._bookkeeping_sync": ("gen.set_offset", "all that it does with `input_batch.generators`"),
    "EngineCore.step_with_batch_queue": ("self.scheduler.has_requests()", "with steps in stages, likewise"),
    "SpinCondition.wait": ("self.busy_loop_s", "polls for so long after a message, then sleeps for `timeout_ms`"),
    "Worker.execute_model": ("_pp_send_work", "waits for the last sends, receives, computes, sends"),
    "GPUModelRunner.sync_and_gather_intermediate_tensors": ("copy_", "copies received tensors, also from the host"),
    "GroupCoordinator.__init__": ("torch.distributed.new_group(", "creates each group by it"),
    "GroupCoordinator.broadcast_object": ("src", "for several stages only agrees on the engine's name"),
    "GroupCoordinator.isend_tensor_dict": ("tensor_dict", "sends hidden states; its first handle is the names'"),
    "GroupCoordinator.irecv_tensor_dict": ("return tensor_dict, handles, postprocess", "receives hidden states"),
    "WorkerWrapperBase.init_worker": ("worker_class(**kwargs)", "`worker_cls` names any callable"),
    "WorkerWrapperBase.initialize_from_config": ("kv_cache_configs[self.global_rank]", "chooses a stage's"),
    "WorkerProc.__init__": ("update_block_size_for_backend(vllm_config)", "called once the model is loaded"),
    "WorkerProc._init_message_queues": ("self.worker.rank", "the only attribute of a worker that is not called"),
    "EngineCoreProc._handle_shutdown": ("finish_requests", "aborts all requests at once, with None for their ids"),
    "EngineCoreProc.has_work": ("has_requests", "likewise before it blocks in its input queue"),
    "EngineCoreProc._process_input_queue": ("input_queue", "blocks in `input_queue.get` without work"),
    "EngineCoreProc._handle_client_request": ("WAKEUP", "a message that only ends the wait"),
    "EngineCoreProc.run_busy_loop": ("_process_input_queue", "the loop itself, entered once after start-up"),
}
"""Method: (a name that its source must use, the assumption)."""

CLASSES = {
    "Scheduler": Scheduler,
    "KVCacheManager": KVCacheManager,
    "EngineCore": EngineCore,
    "EngineCoreProc": EngineCoreProc,
    "GroupCoordinator": GroupCoordinator,
    "WorkerProc": WorkerProc,
    "WorkerWrapperBase": WorkerWrapperBase,
    "GPUModelRunner": GPUModelRunner,
    "SpinCondition": SpinCondition,
    "Worker": Worker,
}

RECENT_S = 2.0
RECENT_RECHECK_MS, RECHECK_MS = 2, 100
"""Longest sleep of a queue's reader, within `RECENT_S` of a message and later."""


def computes_in_process(engine: EngineCore) -> bool:
    """True if the thread that runs the engine's loop also runs the model, on a CPU."""
    return current_platform.is_cpu() and isinstance(engine.model_executor, UniProcExecutor)


def make_readers_block() -> None:
    """Let readers of vLLM's queues between processes block, instead of polling for a second after each message.

    ZeroMQ loses a notification now and then, because the sockets conflate. So a reader looks again by itself, often
    after a message, and rarely when it is idle.
    """

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        is_recent = time.monotonic() - self.last_read < RECENT_S
        self.busy_loop_s = -1.0
        original(self, min(timeout_ms or RECHECK_MS, RECENT_RECHECK_MS if is_recent else RECHECK_MS))

    original = SpinCondition.wait
    SpinCondition.wait = wait
    set_timer_slack(USUAL_S)


def call_when_serving(attach: Callable[[EngineCore, Callable[[], None]], None]) -> None:
    """Call ``attach(engine, wake)`` when an engine enters its loop, where requests may wait already.

    vLLM gives a scheduler no access to its engine, and without the engine's input queue the loop could only be woken by
    polling. So this wraps the loop's entry. It cannot wrap the engine's constructor, because that is running when the
    scheduler's module is imported.
    """
    original = EngineCoreProc.run_busy_loop

    @wraps(original)
    def run_busy_loop(engine: EngineCoreProc) -> None:
        attach(engine, lambda: engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        original(engine)

    EngineCoreProc.run_busy_loop = run_busy_loop
