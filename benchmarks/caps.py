"""Recomputation and offload under memory caps: simulated and measured memory and step, on two ranks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import QUICKSTART, most_allocated, random_batches
from benchmarks.results import finish, parse, show
from weft.conf.compose import compose
from weft.pipeline.action import Action
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

NUM_RANKS, STEPS, TIMEOUT_S = 2, 3, 400
FLOPS_PER_S = 5e8
"""Speed of the emulated ranks: an action takes about half a second, of which the CPU computes a few hundredths, or
tenths if it is busy."""
COMMON = (
    "pipeline.stages=2",
    "pipeline.schedule=auto",
    "pipeline.placement=fold",
    "pipeline.search_seconds=0",
    "pipeline.microbatches=6",
    "pipeline.offload_mbps=1000",
)
ALONE, RECOMPUTE, OFFLOAD = (), ("pipeline.recompute=auto",), ("pipeline.offload=true",)
BOTH = ("pipeline.recompute=attention", "pipeline.offload=true")
CASES = {
    "neither": (40_000_000, ALONE),
    "recomputation": (14_000_000, RECOMPUTE),
    "offload": (14_000_000, OFFLOAD),
    "both": (12_000_000, BOTH),
}
"""A memory cap in bytes, and what `auto` may do about it. Without either, a cap of 14 MB has no schedule."""


@dataclass(frozen=True, kw_only=True)
class CapResult:
    """A rank under a cap, in bytes and seconds.

    Attributes:
        predicted_bytes, measured_bytes: peak of all tensors on the device.
        predicted_saved, measured_saved: peak of saved activations.
        predicted_s, measured_s: the step, of emulated compute.
        offloads: activations that went to the host in a step.
    """

    predicted_bytes: float
    measured_bytes: float
    predicted_saved: float
    measured_saved: float
    predicted_s: float
    measured_s: float
    offloads: int
    losses: list[float]


def capped(cap_bytes: int, settings: tuple[str, ...], steps: int = STEPS) -> CapResult:
    """Train under a cap, with actions that take as long as the plan assumes, and return this rank's result."""
    from weft.engine.initialize import initialize
    from weft.engine.planning import gathering

    config = compose([*QUICKSTART, *COMMON, f"pipeline.memory_cap_bytes={cap_bytes}", *settings])
    speed = patch.object(gathering, "usable_flops", lambda *_: (FLOPS_PER_S, "given"))
    on_host = patch("weft.engine.backward.offload.host_buffer", _unrecorded)
    with speed, on_host, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine, *_ = initialize(config=config)
        _emulate(engine)
        engine.set_dataiterator(random_batches(config))
        losses, measured_s = [], 0.0
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            losses.append(float(engine.train_batch()))
            measured_s = time.perf_counter() - began
        plan, rank, saved = engine.plan, engine.pipe_rank, engine.records[-1].peak_bytes
        engine.destroy()
        del engine
    row = plan.schedule().rows[rank]
    return CapResult(
        predicted_bytes=plan.memory[rank].total,
        measured_bytes=most_allocated(profiled),
        predicted_saved=plan.memory[rank].activations,
        measured_saved=saved,
        predicted_s=plan.step_s,
        measured_s=measured_s,
        offloads=sum(slot[0].op.value == "OFFLOAD" for slot in row),
        losses=losses,
    )


def _unrecorded(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Return a buffer that the profiler of the device's memory, here also the host's, does not count."""
    return torch.from_numpy(np.empty(num_bytes, np.uint8))


def _emulate(engine: Any) -> None:
    """Let each action take the seconds that the plan assumes."""
    compute, stages = engine.executor.compute, engine.plan.costs.stages
    around = compute.around

    @contextmanager
    def timed(action: Action, *args: Any) -> Iterator[None]:
        ends = time.perf_counter() + stages[action.stage].seconds(action.op)
        inner: AbstractContextManager[None] = around(action, *args)
        with inner:
            yield
        time.sleep(max(0.0, ends - time.perf_counter()))

    compute.around = timed


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit code."""
    args = parse(argparse.ArgumentParser(prog="python -m benchmarks caps", description=__doc__), argv)
    table = table_of(rows(), "two ranks of the quickstart, 6 micro-batches: MB of the fullest rank, seconds of a step")
    show(table)
    return finish(args, "caps", {"caps": table})


def rows() -> Iterator[dict[str, object]]:
    """Yield a row for each case, about the rank with the worst prediction of memory."""
    for name, (cap_bytes, settings) in list(CASES.items()):
        found = run_ranks(NUM_RANKS, capped, cap_bytes, settings, timeout_s=TIMEOUT_S)
        worst = max(found, key=lambda rank: abs(rank.predicted_bytes / rank.measured_bytes - 1))
        yield {
            "allowed": name,
            "cap": f"{cap_bytes / 1e6:.0f}",
            "offloads": max(rank.offloads for rank in found),
            "saved": f"{worst.predicted_saved / 1e6:.2f}",
            "measured": f"{worst.measured_saved / 1e6:.2f}",
            "total": f"{worst.predicted_bytes / 1e6:.1f}",
            "total measured": f"{worst.measured_bytes / 1e6:.1f}",
            "memory error": f"{worst.predicted_bytes / worst.measured_bytes - 1:+.1%}",
            "step": f"{worst.predicted_s:.3f}",
            "step measured": f"{worst.measured_s:.3f}",
            "step error": f"{worst.predicted_s / worst.measured_s - 1:+.1%}",
        }
