"""What a memory checkpoint after every step costs training, beside steps without."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import finish, parse, show
from weft.conf.schema import ModelConfig, PipelineConfig, TrainConfig, WeftConfig, ZeroConfig
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

STAGES, REPLICAS = 2, 2
HOSTS = (0, 1, 0, 1)
"""The host of each rank: a replica each, so that every copy has a partner."""
VOCAB, LENGTH = 1024, 256
WARM_UP = 2
TIMEOUT_S = 900
GOAL = 0.01
"""Most that training may wait for memory checkpoints, of a step."""


@dataclass(frozen=True)
class Measured:
    """Of one rank: steps with and without a memory checkpoint, by turns.

    Attributes:
        with_s, without_s: seconds of each step.
        stalled: of each step with one, the share in which training waited for it.
        cpu_with_s, cpu_without_s: processor seconds of each step, on all threads of the rank.
        num_bytes: of the rank's memory checkpoint.
    """

    with_s: list[float]
    without_s: list[float]
    stalled: list[float]
    cpu_with_s: list[float]
    cpu_without_s: list[float]
    num_bytes: int


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks checkpoints", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind")
    parser.add_argument("--width", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--microbatches", type=int, default=8, help="per step and replica")
    args = parse(parser, argv)
    rows = [_row(zero, args) for zero in (0, 1)]
    table = table_of(rows, f"a memory checkpoint after every step, {STAGES} stages x {REPLICAS} replicas on 2 hosts")
    show(table)
    met = all(float(row["stall / step"].split()[0].rstrip("%")) < 100 * GOAL for row in rows)
    show(f"goal: training waits for less than {GOAL:.0%} of a step: {'met' if met else 'not met'}")
    return finish(args, "checkpoints", table, met=met)


def _row(zero: int, args: argparse.Namespace) -> dict[str, str]:
    folder = tempfile.mkdtemp(prefix="weft-bench-", dir="/dev/shm")
    try:
        ranks = run_ranks(
            STAGES * REPLICAS, measure, folder, zero, args.steps, args.width, args.microbatches, timeout_s=TIMEOUT_S
        )
    finally:
        shutil.rmtree(folder)
    slowest = max(ranks, key=lambda rank: median(rank.stalled))
    low, middle, high = quantiles(slowest.stalled, n=4)
    cpu = [
        with_s / without_s
        for rank in ranks
        for with_s, without_s in zip(rank.cpu_with_s, rank.cpu_without_s, strict=True)
    ]
    return {
        "ZeRO": str(zero),
        "MB a rank": f"{max(rank.num_bytes for rank in ranks) / 1e6:.1f}",
        "step without": f"{median(ranks[0].without_s):.2f} s",
        "step with / without": f"{median(ranks[0].with_s) / median(ranks[0].without_s):.3f}",
        "CPU with / without": f"{median(cpu):.3f}",
        "stall / step": f"{middle:.2%} (quartiles {low:.2%} to {high:.2%})",
        "worst stall": f"{max(slowest.stalled):.2%}",
    }


def measure(folder: str, zero: int, steps: int, width: int, microbatches: int) -> Measured:
    """Steps of one rank, by turns with and without a memory checkpoint."""
    from weft.engine.checkpoint.memory import HostMemory
    from weft.engine.initialize import initialize

    engine, *_ = initialize(config=_config(zero, width, microbatches))
    memory = engine.open_memory(HostMemory(Path(folder, f"host{HOSTS[dist.get_rank()]}")))
    engine.set_dataiterator(_batches())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    stalled: list[float] = []
    for number in range(2 * (steps + WARM_UP)):
        turn = number % 2 == 0
        dist.barrier()
        before, begun, cpu_begun = memory.stalled_s, perf_counter(), process_time()
        if turn:
            memory.take({})
        engine.train_batch()
        took, cpu_took = perf_counter() - begun, process_time() - cpu_begun
        memory.finish()
        if number >= 2 * WARM_UP:
            seconds[turn].append(took)
            cpu[turn].append(cpu_took)
            if turn:
                stalled.append((memory.stalled_s - before) / took)
    held = sum(path.stat().st_size for path in memory.memory.root.rglob(f"rank-{dist.get_rank():03d}.safetensors"))
    dist.barrier()
    return Measured(seconds[True], seconds[False], stalled, cpu[True], cpu[False], held // 2)


def _config(zero: int, width: int, microbatches: int) -> WeftConfig:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
    }
    return WeftConfig(
        model=ModelConfig(arch="llama", overrides=shape, self_check=False),
        pipeline=PipelineConfig(stages=STAGES, microbatches=microbatches),
        zero=ZeroConfig(stage=zero),
        train=TrainConfig(microbatch_size=1, steps=1000),
    )


def _batches() -> Iterator[dict[str, Tensor]]:
    ids = torch.arange(LENGTH).view(1, -1) % VOCAB
    while True:
        yield {"input_ids": ids, "labels": ids}
