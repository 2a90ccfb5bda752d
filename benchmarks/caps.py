"""Recomputation and offload under memory caps: simulated and measured memory and step, on two ranks."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.memory import QUICKSTART, random_batches, recorded_tensors
from benchmarks.results import finish, parse, show
from weft.conf.compose import compose
from weft.pipeline.action import Action, Op
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

NUM_RANKS, STEPS, TIMEOUT_S = 2, 3, 400
FLOPS_PER_S = 5e8
"""Speed of the emulated ranks: an action takes half a second, of which a quiet CPU computes a few hundredths."""
COMMON = (
    "pipeline.stages=2",
    "pipeline.schedule=auto",
    "pipeline.placement=fold",
    "pipeline.search_seconds=0",
    "pipeline.microbatches=6",
    "pipeline.offload_mbps=1000",
)
CASES = {
    "neither": (40_000_000, ()),
    "recomputation": (14_000_000, ("pipeline.recompute=auto",)),
    "offload": (14_000_000, ("pipeline.offload=true",)),
    "both": (12_000_000, ("pipeline.recompute=attention", "pipeline.offload=true")),
}
"""A memory cap in bytes, and what `auto` may do about it. Without either, a cap of 14 MB has no schedule."""


@dataclass(frozen=True, kw_only=True)
class CapResult:
    """A rank under a cap.

    Attributes:
        predicted, measured: peak bytes of all tensors on the device.
        predicted_s, measured_s: seconds of the step. The latter is that of emulated compute.
        offloads: activations that are copied to the host in a step.
    """

    predicted: float
    measured: float
    predicted_s: float
    measured_s: float
    offloads: int

    @property
    def error(self) -> float:
        """The error of the predicted memory, as a share of the measurement."""
        return self.predicted / self.measured - 1


def capped(cap_bytes: int, settings: tuple[str, ...], steps: int = STEPS, *, emulated: bool = True) -> CapResult:
    """Train under a cap and return this rank's result. A collective call.

    Args:
        emulated: let actions take the seconds that the plan assumes.
    """
    from weft.engine.backward import offload
    from weft.engine.initialize import initialize
    from weft.engine.planning import gathering
    from weft.recipes.emulation.tensor_peak import TensorPeak

    config = compose([*QUICKSTART, *COMMON, f"pipeline.memory_cap_bytes={cap_bytes}", *settings])
    speed = patch.object(gathering, "usable_flops", lambda *_: (FLOPS_PER_S, "given"))
    on_host = patch.object(offload, "host_buffer", _unrecorded)
    with speed, on_host, recorded_tensors():
        peak = TensorPeak()
        engine, *_ = initialize(config=config)
        if emulated:
            emulate(engine)
        engine.set_dataiterator(random_batches(config))
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            engine.train_batch()
            measured_s = time.perf_counter() - began
        plan, rank = engine.plan, engine.pipe_rank
        engine.destroy()
        del engine
        gc.collect()
        measured = peak.stop()
    return CapResult(
        predicted=plan.memory[rank].total,
        measured=measured,
        predicted_s=plan.step_s,
        measured_s=measured_s,
        offloads=sum(slot[0].op is Op.OFFLOAD for slot in plan.schedule().rows[rank]),
    )


def _unrecorded(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Return a buffer that the record of the device's memory, here also the host's, does not count."""
    return torch.from_numpy(np.empty(num_bytes, np.uint8))


def emulate(engine: Any) -> None:
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
    return finish(args, "caps", table)


def rows() -> Iterator[dict[str, object]]:
    """Yield a row for each case, about the rank with the worst prediction of memory."""
    for name, (cap_bytes, settings) in CASES.items():
        found = run_ranks(NUM_RANKS, capped, cap_bytes, settings, timeout_s=TIMEOUT_S)
        worst = max(found, key=lambda rank: abs(rank.error))
        yield {
            "allowed": name,
            "cap": f"{cap_bytes / 1e6:.0f}",
            "offloads": max(rank.offloads for rank in found),
            "total": f"{worst.predicted / 1e6:.1f}",
            "total measured": f"{worst.measured / 1e6:.1f}",
            "memory error": f"{worst.error:+.1%}",
            "step": f"{worst.predicted_s:.3f}",
            "step measured": f"{worst.measured_s:.3f}",
            "step error": f"{worst.predicted_s / worst.measured_s - 1:+.1%}",
        }
