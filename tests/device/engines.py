"""Runs of the engine's ranks on emulated devices under NCCL's rules."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.device import cuda, rules
from weft.comm.collectives import Rewrite
from weft.comm.links import Sites
from weft.conf.schema import CommConfig, WeftConfig

LIMIT_S = 60.0
"""Far beyond what a loaded machine needs for a step."""


def losses_under_rules(
    configs: list[WeftConfig], steps: int, *, bound: bool = False, sites: tuple[int, ...] = ()
) -> tuple[list[list[float]], dict[str, int]]:
    """Losses of several runs, and what the host has waited for inside their steps.

    Args:
        bound: see `rules.bound`.
        sites: of each rank, where there are several.
    """
    from tests.engine.tiny import many_losses

    over = Sites(sites, CommConfig(connections=2, timeout_s=LIMIT_S)) if sites else None
    rules.join(LIMIT_S, bound_device=bound, sites=over)
    if over is not None:
        rules.count_waits_for_sites()
    waits = note_waits_in_steps()
    return many_losses(configs, steps), dict(waits)


def divided_under_rules(
    configs: list[WeftConfig], steps: int, hosts: tuple[int, ...]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the collectives of runs whose replicas lie on several hosts, their losses, and the host's waits in steps.

    Args:
        hosts: of each rank, as it tells the others.

    Returns:
        Of each run its losses, the rewrites that were started, as (collective, shape of the mesh, primitives of the
        steps, number of chunks), how many micro-batches are launched together, and in how many buckets each stage's
        weights are cut by the plan.
    """
    from tests.engine.tiny import begun, check_order
    from weft.comm.collectives import probe
    from weft.comm.collectives.communicator import Communicator

    probe.host_identity = lambda: ("host", hosts[dist.get_rank()])
    rules.join(LIMIT_S, bound_device=True)
    waits = note_waits_in_steps()
    start, started = Communicator.start, set()

    def noting(communicator: Communicator, rewrite: Rewrite, *tensors: Any) -> Any:
        steps = tuple(step.primitive for step in rewrite.steps)
        started.add((rewrite.collective.primitive, rewrite.mesh.shape, steps, len(rewrite.granularity)))
        return start(communicator, rewrite, *tensors)

    Communicator.start = noting  # type: ignore[method-assign]
    found = []
    for config in configs:
        started.clear()
        engine = begun(config)
        losses = [float(engine.train_batch()) for _ in range(steps)]
        check_order(engine)
        plan = engine.plan.overlap
        found.append(
            {
                "losses": losses,
                "started": set(started),
                "together": plan.together if plan is not None else 0,
                "buckets": [len(stage.cuts) + 1 for stage in plan.stages] if plan is not None else [],
            }
        )
        engine.destroy()
        dist.barrier()
    return found, dict(waits)


def adapted_under_rules(configs: list[WeftConfig]) -> list[dict[str, Any]]:
    """Return the losses and schedules of runs, of which the adaptive ones change their schedule."""
    from tests.engine.planning.adapted import train

    rules.join(LIMIT_S, bound_device=True)
    return [train(config, 0) for config in configs]


def without_eager_connection(config: WeftConfig, limit_s: float) -> str:
    """Return the error of a step whose hops are not connected before."""
    from tests.engine.tiny import weft_losses
    from weft.comm import torch_channel

    rules.join(limit_s)
    torch_channel.connect_pairs = lambda *_: None  # type: ignore[assignment]
    try:
        weft_losses(config, 1)
    except RuntimeError as error:
        return str(error)
    return ""


def a_run(config: WeftConfig, folder: str, overrides: list[str]) -> dict[str, Any]:
    """Evaluation between steps, a checkpoint in the background, a resume, and a recipe that ends by the clock."""
    from tests.engine.tiny import batches, begun
    from weft.conf import load
    from weft.engine.initialize import initialize
    from weft.recipes.train import train

    rules.join(LIMIT_S)
    waits = note_waits_in_steps()
    engine = begun(config)
    losses = [float(engine.train_batch())]
    held_back = batches(engine.replica, engine.num_replicas)
    evaluated, logits = engine.eval_batch(held_back, return_logits=True, num_micro_batches=3)
    engine.save_checkpoint(folder)
    losses += [float(engine.train_batch()) for _ in range(2)]
    engine.finish_checkpoints()
    timelines = engine.measured_timelines()
    engine.destroy()

    resumed, *_ = initialize(config=config)
    path, _ = resumed.load_checkpoint(folder)
    rest = itertools.islice(batches(resumed.replica, resumed.num_replicas), config.pipeline.microbatches, None)
    resumed.set_dataiterator(rest)
    again = [float(resumed.train_batch()) for _ in range(2)]
    resumed.destroy()

    stopped = train(load(overrides)).global_steps
    dist.barrier()
    return {
        "losses": losses,
        "again": again,
        "evaluated": float(evaluated),
        "logits": len(logits) if logits else 0,
        "spans": len(timelines[-1].spans),
        "loaded": path and Path(path).name,
        "stopped": stopped,
        "waits": dict(waits),
    }


def note_waits_in_steps() -> Counter[str]:
    """Filled with what a thread of the host waits for while any engine trains on a batch."""
    from weft.engine.engine import WeftEngine

    train_batch, found = WeftEngine.train_batch, Counter[str]()

    def waits() -> Counter[str]:
        return cuda.observed("waits") + cuda.observed("thread waits")

    def noting(engine: WeftEngine, *args: Any) -> Tensor:
        before = waits()
        loss = train_batch(engine, *args)
        found.update(waits() - before)
        return loss

    WeftEngine.train_batch = noting  # type: ignore[method-assign]
    return found
