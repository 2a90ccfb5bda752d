"""Liveness of an engine that publishes no status, such as a decode server's: it returns a call between its steps.

vLLM's own health check notices ended processes only: a stopped engine would stay healthy, its requests unanswered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psutil

from weft.inference.worker.status import BEAT_S, STALE_S, STUCK_S

LEAST_CPU_S = 0.01
"""Processor seconds in `BEAT_S` from which an engine runs."""


class EngineEcho:
    """One call to the engine at a time, and the seconds that it takes.

    Only seconds in which this process runs count, so that an engine that was stopped with it is not blamed.
    """

    def __init__(self) -> None:
        self._calling: asyncio.Task[None] | None = None
        self._problem = ""

    def problem(self, call: Callable[[], Awaitable[object]]) -> str:
        """Call the engine unless a call is under way. Return why it makes no progress, or empty if it does."""
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call(call))
        return self._problem

    async def _call(self, call: Callable[[], Awaitable[object]]) -> None:
        answer = asyncio.ensure_future(call())
        silent_s = idle_s = 0.0
        computed_s = engine_cpu_s()
        try:
            while not (await asyncio.wait((answer,), timeout=BEAT_S))[0]:
                before_s, computed_s = computed_s, engine_cpu_s()
                silent_s += BEAT_S
                idle_s = idle_s + BEAT_S if computed_s - before_s < LEAST_CPU_S else 0.0
                if idle_s > STALE_S:
                    self._problem = f"the engine has not run for {idle_s:.0f} s"
                elif silent_s > STUCK_S:
                    self._problem = f"the engine has not responded for {silent_s:.0f} s"
            answer.exception()  # one of an ended engine, which vLLM's health check notices
        finally:
            self._problem = ""
            answer.cancel()


def engine_cpu_s() -> float:
    """Return the processor time of this process's descendants that live: the engine, and its workers."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            total_s += sum(process.cpu_times()[:2])
        except psutil.Error:  # it has ended
            continue
    return total_s
