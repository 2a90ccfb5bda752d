"""Training steps of the engine on emulated devices, and what the devices observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Observed:
    """A rank's losses, and observations of the device in and between its steps."""

    losses: list[float] = field(default_factory=list)
    races: Counter[str] = field(default_factory=Counter)
    contexts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """Host waits between the first and the last launch of a step."""
    num_launches: int = 0
    peak_bytes: int = 0


def train(cases: list[dict[str, Any]], steps: int) -> list[Observed]:
    """Train with each case's keywords of `tiny_config`, one after the other, and return what was observed."""
    return [train_one(case, steps) for case in cases]


def train_one(keywords: dict[str, Any], steps: int, after_step: Callable[[Any], None] | None = None) -> Observed:
    """Train with keywords of `tiny_config`."""
    import torch
    import torch.distributed as dist

    from tests.device import cuda
    from tests.engine.tiny import batches, check_order, tiny_config
    from weft.engine.engine import WeftEngine
    from weft.engine.initialize import initialize

    seen = Observed()
    execute = WeftEngine._exec_schedule

    def noting(engine: WeftEngine, *args: Any) -> None:
        before = cuda.observed("waits")
        execute(engine, *args)
        seen.waits += cuda.observed("waits") - before

    WeftEngine._exec_schedule = noting  # type: ignore[method-assign]
    cuda.forget()
    cuda.errors.clear()
    torch.cuda.reset_peak_memory_stats()
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            engine, *_ = initialize(config=tiny_config(**keywords))
            engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
            launched = cuda.native.emulated_num_launched()
            for _ in range(steps):
                seen.losses.append(float(engine.train_batch()))
                if after_step is not None:
                    after_step(engine)
    finally:
        WeftEngine._exec_schedule = execute  # type: ignore[method-assign]
    check_order(engine)
    torch.cuda.synchronize()
    seen.num_launches = cuda.native.emulated_num_launched() - launched
    seen.peak_bytes = torch.cuda.max_memory_allocated()
    engine.destroy()
    dist.barrier()
    seen.races, seen.contexts = cuda.observed("races"), cuda.observed("contexts")
    seen.errors = cuda.observed("errors") + Counter(cuda.errors)
    return seen


def train_on_cpu(cases: list[dict[str, Any]], steps: int) -> list[list[float]]:
    """Return the losses of the same cases on a CPU, by the same attention."""
    import torch

    from tests.engine.tiny import many_losses, tiny_config

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return many_losses([tiny_config(**case) for case in cases], steps)
