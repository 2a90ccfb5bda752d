"""Weft's engine on tiny models, with the strand pairs of its schedule interleaved or not."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.tiny import batches
from weft.conf.schema import WeftConfig
from weft.engine.initialize import initialize
from weft.engine.strands.pair_scheduler import PairScheduler


def trained(configs: list[WeftConfig], steps: int) -> list[dict[str, Any]]:
    """Return for each run on this rank: losses and norms of its steps, its weights' digest, and hand-overs."""
    found = []
    handovers = _count_handovers()
    for config in configs:
        before = len(handovers)
        engine, *_ = initialize(config=config)
        torch.manual_seed(dist.get_rank())
        engine.set_dataiterator(batches(engine.replica, engine.num_replicas))
        run = [(float(engine.train_batch()), engine.get_global_grad_norm()) for _ in range(steps)]
        engine.sharding.settle()
        digest = hashlib.sha256()
        for fragment in engine.sharding.fragments():
            digest.update(fragment.name.encode() + fragment.tensor.detach().numpy().tobytes())
        plans = {name: str(plan) for name, plan in engine.pairs.plans.items()} if engine.pairs else {}
        engine.destroy()
        dist.barrier()
        found.append(
            {"steps": run, "weights": digest.hexdigest(), "handovers": handovers[before:], "plans": plans}
            | {"strand threads": sum(thread.name == "weft strand" for thread in threading.enumerate())}
        )
    return found


def _count_handovers() -> list[int]:
    """Count the hand-overs of each pair from now on."""
    counts: list[int] = []
    settle = PairScheduler.settle

    def noting(scheduler: PairScheduler) -> None:
        counts.append(scheduler.handovers)
        settle(scheduler)

    PairScheduler.settle = noting  # type: ignore[method-assign]
    return counts
