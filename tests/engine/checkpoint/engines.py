"""Train, save, and go on in another layout, on ranks of their own."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.tiny import batches
from weft.conf.schema import Precision, WeftConfig


def each(function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of ``function`` for each of these arguments, one after the other in the same processes."""
    results = []
    for args in calls:
        results.append(function(*args))
        gc.collect()  # a gloo group's threads end with its last reference
    return results


def build(config: WeftConfig) -> Any:
    from deepspeed.accelerator import get_accelerator

    from weft.engine.initialize import initialize

    # DeepSpeed refuses fp16 on CPUs for its speed; its optimisers for it work there.
    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]
    engine, *_ = initialize(config=config)
    return engine


def data(engine: Any, step: int, global_batches: int) -> Any:
    """Micro-batches of one global sequence from a step on, whatever the number of replicas."""
    everything = itertools.islice(batches(0, 1), step * global_batches, None)
    return itertools.islice(everything, engine.replica, None, engine.num_replicas)


def train(engine: Any, steps: int, global_batches: int) -> list[float]:
    engine.set_dataiterator(data(engine, engine.global_steps, global_batches))
    return [float(engine.train_batch()) for _ in range(steps)]


def save_and_go_on(config: WeftConfig, folder: str, before: int, after: int, global_batches: int) -> dict[str, Any]:
    """Train, save, train on; ``{site}`` in the folder becomes the pipeline rank."""
    engine = build(config)
    folder = folder.format(site=engine.pipe_rank)
    first = train(engine, before, global_batches)
    engine.save_checkpoint(folder, client_state={"mark": before})
    last = train(engine, after, global_batches)
    dist.barrier()
    return {"losses": first + last, "rng": float(torch.rand(1)), "lr": engine.get_lr()[0]}


def save_in_background(config: WeftConfig, folder: str, before: int, after: int, global_batches: int) -> list[float]:
    """Train, begin to save, train on while it is written."""
    from weft.engine.checkpoint import BackgroundWriter, check_folder, save_engine

    engine = build(config)
    writer = BackgroundWriter.open()
    check_folder(engine, Path(folder), keep=2)
    train(engine, before, global_batches)
    path = save_engine(engine, Path(folder), client_state={"mark": before}, background=writer)
    losses = train(engine, after, global_batches)
    assert writer.wait() == path
    dist.barrier()
    return losses


def resume(config: WeftConfig, folder: str, after: int, global_batches: int, trained: int = 0) -> dict[str, Any]:
    """Load into a fresh engine (or one that trained a few steps of its own), and train on."""
    engine = build(config)
    folder = folder.format(site=dist.get_rank() // 2)
    train(engine, trained, global_batches)
    path, client = engine.load_checkpoint(folder)
    losses = train(engine, after, global_batches)
    dist.barrier()
    return {
        "losses": losses,
        "client": client,
        "path": path and Path(path).name,
        "rng": float(torch.rand(1)),
        "lr": engine.get_lr()[0],
        "steps": engine.global_steps,
    }


def tags(config: WeftConfig, folder: str, global_batches: int) -> dict[str, Any]:
    """Save under a tag and without, then restore all, and parts, of the tagged one."""
    from weft.engine.checkpoint import CheckpointError

    engine = build(config)
    losses = train(engine, 2, global_batches)
    engine.save_checkpoint(folder, tag="best", client_state={"ema": torch.arange(3), "loss": losses[-1]})
    rate = engine.get_lr()[0]
    losses += train(engine, 3, global_batches)
    engine.save_checkpoint(folder)
    moments = _moments(engine)
    seen: dict[str, Any] = {"losses": losses, "rate": rate, "last_rate": engine.get_lr()[0]}

    def restore(**wanted: Any) -> dict[str, Any]:
        engine.load_checkpoint(folder)
        path, client = engine.load_checkpoint(folder, tag="best", **wanted)
        return {
            "path": path and Path(path).name,
            "ema": client["ema"].tolist(),
            "steps": engine.global_steps,
            "rate": engine.get_lr()[0],
            "kept_moments": all(map(torch.equal, moments, _moments(engine))),
            "loss": float(engine.eval_batch(batches(0, 1), num_micro_batches=2)),
        }

    seen["newest"] = engine.load_checkpoint(folder)[0]
    seen["all"] = restore()
    seen["again"] = train(engine, 3, global_batches)
    seen["no moments"] = restore(load_optimizer_states=False)
    seen["no rates"] = restore(load_lr_scheduler_states=False)
    seen["module only"] = restore(load_module_only=True)
    for name, call in {
        "missing": lambda: engine.load_checkpoint(folder, tag="worst"),
        "unfit": lambda: engine.save_checkpoint(folder, client_state={"args": object()}),
        "strict": lambda: engine.load_checkpoint(folder, load_module_strict=False),
    }.items():
        try:
            call()
        except ValueError as error:
            seen[name] = f"{type(error).__name__}: {error}"
    assert issubclass(CheckpointError, ValueError)
    dist.barrier()
    return seen


def _moments(engine: Any) -> list[torch.Tensor]:
    engine.sharding.settle()
    return [state["exp_avg"].clone() for state in engine.basic_optimizer.state.values()]


def resave(configs: list[WeftConfig], folder: str) -> None:
    """Train and save in the first layout; then, for each other one, load the save before and save again."""
    for number, config in enumerate(configs):
        engine = build(config)
        if number == 0:
            train(engine, 2, config.pipeline.microbatches * engine.num_replicas)
        else:
            engine.load_checkpoint(f"{folder}/{number - 1}")
        engine.save_checkpoint(f"{folder}/{number}")
        dist.barrier()


PRECISIONS = [Precision.fp32, Precision.bf16, Precision.fp16]
