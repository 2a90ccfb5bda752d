"""Everything private that the prefill worker leans on in vLLM 0.32.0, and the one method that it wraps.

`PRIVATE` is checked by tests/vllm/test_contract.py against the vLLM that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

VERSION = "0.32.0"

PRIVATE: dict[str, tuple[str, str]] = {
    "Scheduler.__init__": ("vllm_config", "its first argument; `additional_config` of it holds our settings"),
    "Scheduler.schedule": ("max_num_scheduled_tokens", "read at each call; 0 schedules nothing"),
    "Scheduler.has_requests": ("has_unfinished_requests", "whether the engine's loop steps or blocks"),
    "Scheduler.has_finished_requests": ("finished_req_ids", "ended requests that the model runner must be told of"),
    "Scheduler.add_request": ("requests", "called for each request before it waits"),
    "Scheduler.update_from_output": ("model_runner_output", "called when a step's result is there"),
    "Scheduler.get_request_counts": ("running", "`running` and `waiting` hold requests"),
    "KVCacheManager.get_computed_blocks": ("find_longest_cache_hit", "a look-up; its second value counts tokens"),
    "EngineCore.step": ("has_requests", "steps only if `has_requests` says so"),
    "EngineCoreProc.has_work": ("has_requests", "likewise before it blocks in its input queue"),
    "EngineCoreProc._process_input_queue": ("input_queue", "blocks in `input_queue.get` without work"),
    "EngineCoreProc._handle_client_request": ("WAKEUP", "a message that does nothing but end the wait"),
    "EngineCoreProc.run_busy_loop": ("_process_input_queue", "the loop itself, entered once after start-up"),
}
"""Method: (a name that its source must use, what we take for granted)."""

CLASSES = {
    "Scheduler": Scheduler,
    "KVCacheManager": KVCacheManager,
    "EngineCore": EngineCore,
    "EngineCoreProc": EngineCoreProc,
}


def call_when_serving(attach: Callable[[Any, Callable[[], None]], None]) -> None:
    """Have ``attach(scheduler, wake)`` called when an engine enters its loop.

    vLLM has no hook by which a scheduler learns of its engine's input queue, and without it the
    loop could only be kept awake by spinning. So the loop's entry is wrapped: here, nowhere else.
    """
    original = EngineCoreProc.run_busy_loop

    @wraps(original)
    def run_busy_loop(engine: EngineCoreProc) -> None:
        attach(engine.scheduler, lambda: engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        original(engine)

    EngineCoreProc.run_busy_loop = run_busy_loop
