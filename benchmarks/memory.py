"""Memory of a rank by ZeRO stage and layout, measured, predicted, and compared with DeepSpeed's."""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import process_time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.results import finish, parse, show
from weft.comm.collectives import communicator
from weft.comm.collectives.executors import Pending, Work, completed
from weft.conf.compose import compose
from weft.conf.schema import ModelConfig, PipelineConfig, TrainConfig, WeftConfig, ZeroConfig
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

WIDTH, LAYERS, VOCAB, LENGTH = 512, 8, 512, 16
"""Dimensions of the model: many weights and few tokens, so that weights and their states dominate."""
STEPS = 3
TIMEOUT_S = 110
M_MMAP_THRESHOLD = -3


NUM_RANKS = 4
VOCABULARY = 4096
QUICKSTART = ("recipe=quickstart", f"model.overrides.vocab_size={VOCABULARY}", "model.self_check=false")
_MANY_TOKENS = "model.overrides.vocab_size=131072"
LAYOUTS = (
    ("pipeline.stages=4",),
    ("pipeline.stages=2", "zero.stage=1"),
    ("pipeline.stages=2", "pipeline.schedule=w", "zero.stage=1"),
    ("pipeline.stages=1", "pipeline.recompute=layers"),
    ("pipeline.stages=4", _MANY_TOKENS),
    ("pipeline.stages=2", "parallel.tensor=2", _MANY_TOKENS),
    ("pipeline.stages=1", "parallel.tensor=4", "model.overrides.num_key_value_heads=4", _MANY_TOKENS),
)
"""Departures from the quickstart, each on four ranks."""
_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """Peak bytes of a rank in one layout.

    Attributes:
        predicted: bytes predicted by the plan.
        measured: peak bytes of tensors, including set-up, by the profiler. It records one thread, so collectives run
            on that thread. Some MB that gloo frees in threads of its own are missed.
        step_s: processor seconds of the last step.
    """

    layout: str
    rank: int
    predicted: float
    measured: float
    step_s: float = 0.0

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measurement."""
        return self.predicted / self.measured - 1


def peaks(timeout_s: float, *settings: str) -> Iterator[list[RankPeak]]:
    """Yield the peaks of all ranks for each layout, measured in new processes."""
    for layout in LAYOUTS:
        yield run_ranks(NUM_RANKS, layout_peak, layout, settings, timeout_s=timeout_s)


class _InlineExecutor:
    """Runs collectives on the calling thread, so that their allocations are recorded."""

    def submit(self, work: Work, after: Pending) -> Pending:
        return completed(work(after.result()))

    def close(self) -> None:
        """See `InOrderExecutor`."""


def layout_peak(layout: tuple[str, ...], settings: tuple[str, ...], steps: int = _STEPS) -> RankPeak:
    """Return this rank's peak in a layout of the quickstart. A collective call."""
    from weft.engine.initialize import initialize

    config = compose([*QUICKSTART, *layout, *settings])
    shares = config.parallel.tensor > 1
    inline = patch.object(communicator, "executor_for", lambda *_, **__: _InlineExecutor()) if shares else nullcontext()
    with inline, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine, *_ = initialize(config=config)
        engine.set_dataiterator(random_batches(config))
        for _ in range(steps):
            began = process_time()
            engine.train_batch()
        step_s = process_time() - began
        predicted = engine.plan.memory[engine.pipe_rank].total
        engine.destroy()
        del engine
        gc.collect()
    measured = most_allocated(profiled)
    return RankPeak(
        layout=" ".join(layout), rank=dist.get_rank(), predicted=predicted, measured=measured, step_s=step_s
    )


def most_allocated(profiled: profile) -> int:
    """Return the peak bytes of tensors, from the profiler's record of each allocation and release."""
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in changes))


def random_batches(config: WeftConfig) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of random tokens without end."""
    generator = torch.Generator().manual_seed(0)
    size = config.train.microbatch_size, config.data.sequence_length
    while True:
        ids = torch.randint(VOCABULARY, size, generator=generator)
        yield {"input_ids": ids, "labels": ids}


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="replicas")
    args = parse(parser, argv)
    title = f"peak memory of a rank in MB, {args.ranks} replicas, fp32, Adam, 1 micro-batch"
    table = table_of((_row(stage, args.ranks) for stage in range(4)), title)
    layouts = table_of(layout_rows(), "peak of tensors on a rank of the quickstart in MB, 4 ranks")
    show(table, layouts)
    return finish(args, "memory", {"zero": table, "layouts": layouts})


def layout_rows() -> Iterator[dict[str, object]]:
    """Yield a row for each of the quickstart's layouts, about the rank with the worst prediction."""
    for found in peaks(TIMEOUT_S):
        worst = max(found, key=lambda rank: abs(rank.error))
        yield {
            "layout": worst.layout,
            "rank": worst.rank,
            "predicted": f"{worst.predicted / 1e6:.1f}",
            "measured": f"{worst.measured / 1e6:.1f}",
            "error": f"{worst.error:+.1%}",
        }


def _row(stage: int, ranks: int) -> dict[str, object]:
    ours = max(run_ranks(ranks, weft_peak, stage, timeout_s=TIMEOUT_S))
    theirs = max(run_ranks(ranks, deepspeed_peak, stage, timeout_s=TIMEOUT_S))
    sizes = {"Weft": ours, "DeepSpeed": theirs}
    return {
        "ZeRO": stage,
        **{head: f"{size / 1e6:.0f}" for head, size in sizes.items()},
        "Weft / DeepSpeed": f"{ours / theirs:.2f}",
    }


def _config(stage: int) -> WeftConfig:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": LENGTH,
    }
    bucket = 5_000_000
    return WeftConfig(
        model=ModelConfig(arch="llama", overrides=shape, self_check=False),
        pipeline=PipelineConfig(stages=1, microbatches=1),
        zero=ZeroConfig(stage=stage, reduce_bucket_size=bucket, allgather_bucket_size=bucket),
        train=TrainConfig(microbatch_size=1, steps=STEPS),
    )


def _batches() -> Iterator[dict[str, Tensor]]:
    ids = torch.arange(LENGTH).view(1, -1)
    while True:
        yield {"input_ids": ids, "labels": ids}


def weft_peak(stage: int) -> int:
    """Return a Weft rank's peak memory in bytes."""
    from weft.engine.initialize import initialize

    before = _start()
    engine, *_ = initialize(config=_config(stage))
    engine.set_dataiterator(_batches())
    return _peak(engine.train_batch, before)


def deepspeed_peak(stage: int) -> int:
    """Return the peak memory of a rank of DeepSpeed's own engine, in bytes."""
    import deepspeed

    from weft.conf.deepspeed import deepspeed_config
    from weft.engine.distributed import init_distributed
    from weft.engine.stages.files.loading import build_model

    before = _start()
    config = _config(stage)
    init_distributed(TIMEOUT_S)
    settings = deepspeed_config(config, dist.get_world_size())
    model = build_model(config.model, dtype=torch.float32, seed=0)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    batches = _batches()

    def step() -> None:
        engine.backward(engine(**next(batches), use_cache=False).loss)
        engine.step()

    return _peak(step, before)


def _start() -> int:
    """Return the resident bytes now; from now on freed memory returns to the system."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    torch.set_num_threads(1)
    return _status("VmRSS")


def _peak(step: Callable[[], object], before: int) -> int:
    """Return the peak resident bytes above ``before`` in a step after the optimiser's state has been created."""
    step()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the set-up
    for _ in range(STEPS - 1):
        step()
    dist.barrier()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
