"""Training steps of the engine on emulated devices, and what the devices observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAG_MS = 3.0


@dataclass
class Observed:
    """A rank's losses, and observations of the device in and between its steps."""

    losses: list[float] = field(default_factory=list)
    races: Counter[str] = field(default_factory=Counter)
    contexts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """Host waits of steps after the first."""
    events: list[int] = field(default_factory=list)
    """Number of events that exist after each step."""
    num_launches: int = 0
    peak_bytes: int = 0


def train(cases: list[dict[str, Any]], steps: int, lag_ms: float = 0.0) -> list[Observed]:
    """Train with each case's keywords of `tiny_config`, one after the other, and return what was observed.

    Args:
        lag_ms: delay of operations on other streams than the default one.
    """
    from tests.device import cuda

    cuda.lag(other_ms=lag_ms)
    return [train_one(case, steps) for case in cases]


def train_with_memory(keywords: dict[str, Any], steps: int, root: str) -> Observed:
    """Train with a memory checkpoint in ``root`` after each step, whose copies run late."""
    from tests.device import cuda
    from weft.engine.supervision.memory.checkpoints import attach_memory
    from weft.engine.supervision.memory.slots import HostMemory

    cuda.lag(other_ms=LAG_MS)
    return train_one(keywords, steps, lambda engine: attach_memory(engine, HostMemory(Path(root))))


def train_one(keywords: dict[str, Any], steps: int, attach: Callable[[Any], Any] | None = None) -> Observed:
    import torch
    import torch.distributed as dist

    from tests.device import cuda
    from tests.engine.tiny import batches, check_order, tiny_config
    from weft.engine.initialize import initialize

    seen = Observed()
    cuda.forget()
    cuda.errors.clear()
    torch.cuda.reset_peak_memory_stats()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        engine, *_ = initialize(config=tiny_config(**keywords))
        engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
        memory = attach(engine) if attach is not None else None
        launched = cuda.native.emulated_num_launched()
        for step in range(steps):
            before = cuda.observed("waits")
            loss = engine.train_batch()
            if step:
                seen.waits += cuda.observed("waits") - before
            seen.losses.append(float(loss))
            seen.events.append(cuda.native.emulated_num_events())
            if memory is not None:
                memory.take({})
    if memory is not None:
        memory.finish()
    check_order(engine)
    seen.num_launches = cuda.native.emulated_num_launched() - launched
    seen.peak_bytes = torch.cuda.max_memory_allocated()
    engine.destroy()
    dist.barrier()
    torch.cuda.synchronize()
    seen.races, seen.contexts = cuda.observed("races"), cuda.observed("contexts")
    seen.errors = cuda.observed("errors") + Counter(cuda.errors)
    return seen


def train_on_cpu(cases: list[dict[str, Any]], steps: int) -> list[list[float]]:
    """Return the losses of the same cases on a CPU, by the same attention."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from tests.engine.tiny import many_losses, tiny_config

    get_accelerator().is_fp16_supported = lambda: True

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return many_losses([tiny_config(**case) for case in cases], steps)
