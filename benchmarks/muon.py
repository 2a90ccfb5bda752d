"""A step with Muon over one with AdamW, in Weft and in DeepSpeed at ZeRO-1, where passes take emulated time."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.caps import emulate
from benchmarks.results import finish, parse, show
from weft.conf.deepspeed import deepspeed_sections
from weft.conf.schema import ModelConfig, OptimizerConfig, OptimizerKind, PipelineConfig, TrainConfig, WeftConfig
from weft.engine.deepspeed.construction import parameter_groups
from weft.engine.distributed import init_distributed
from weft.engine.initialize import initialize
from weft.engine.planning import gathering
from weft.engine.stages.files.loading import build_model
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

NUM_RANKS, WARM_UP, TIMEOUT_S = 2, 1, 1800
LENGTH, REAL_LENGTH = 512, 64
"""Tokens of the sequences that a pass lasts for, and of the one that is computed."""
GOAL = 1.02
"""Largest ratio of a whole step with Muon to one with AdamW."""


@dataclass(frozen=True)
class Timed:
    """The measured steps of an engine, each on its slowest rank.

    Attributes:
        steps_s: seconds of each step.
        ends_s: seconds of its end: from the last backward to the new weights.
        processor_ends_s: processor seconds of that.
    """

    engine: str
    optimizer: str
    steps_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    processor_ends_s: tuple[float, ...]

    def over(self, base: Timed) -> list[float]:
        """Return the ratios of the steps to those of ``base``, with which they took turns."""
        return [step_s / base_s for step_s, base_s in zip(self.steps_s, base.steps_s, strict=True)]


@dataclass
class _Run:
    """An engine's step, and when the last backward of the latest step ended, by both clocks."""

    step: Callable[[], None]
    backward_ended_s: tuple[float, float] = (0.0, 0.0)

    def seconds(self) -> tuple[float, float, float]:
        """Run a step, and return its seconds, those of its end, and the processor's of its end."""
        start, _ = _now_s()
        self.step()
        end, end_processor = _now_s()
        backward, backward_processor = self.backward_ended_s
        return end - start, end - backward, end_processor - backward_processor


def main(argv: Sequence[str]) -> int:
    """Run every engine in turn, a step each, and return 1 if a step of Weft with Muon exceeds the goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks muon", description=__doc__)
    parser.add_argument("--width", type=int, default=128, help="hidden size of the Llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help=f"of a micro-batch; a multiple of {LENGTH}")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step and pipeline")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each engine")
    args = parse(parser, argv)
    sizes = (args.width, args.layers, args.tokens, args.microbatches)
    found = run_ranks(NUM_RANKS, _measured, *sizes, args.rounds, _flops_per_s(args.width), timeout_s=TIMEOUT_S)
    rows = [_slowest(key, [ranks[key] for ranks in found]) for key in found[0]]
    of_adamw = {row.engine: row for row in rows if row.optimizer == "AdamW"}
    shape = f"{args.layers} layers of {args.width}, {args.microbatches} micro-batches of {args.tokens} tokens"
    show(table_of([_row(row, of_adamw[row.engine]) for row in rows], f"Llama of {shape}, emulated", left=2))
    worst = max(median(row.over(of_adamw[row.engine])) for row in rows if row.engine.startswith("Weft"))
    print(f"goal: a step of Weft with Muon takes at most {GOAL} of one with AdamW: {worst:.3f}")
    return finish(args, "muon", rows, met=worst <= GOAL)


def _flops_per_s(width: int) -> float:
    """Return the speed of products of square matrices, which is the speed of Newton-Schulz iterations and of passes."""
    torch.set_num_threads(1)
    matrix, times = torch.rand(width, width), []
    for _ in range(99):
        start = process_time()
        matrix @ matrix
        times.append(process_time() - start)
    return 2 * width**3 / median(times)


def _measured(
    width: int, layers: int, tokens: int, microbatches: int, rounds: int, flops_per_s: float
) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """Return the times of this rank. Engines take turns, so that they share whatever else the machine does."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # DeepSpeed's Newton-Schulz, as in Weft, without minutes of compilation
    init_distributed()  # DeepSpeed's own would compile an operator for minutes
    runs: dict[tuple[str, str], _Run] = {}
    configs = {
        (stages, optimizer): _config(width, layers, tokens, microbatches, stages, kind)
        for stages in (1, 2)
        for kind, optimizer in ((OptimizerKind.adamw, "AdamW"), (OptimizerKind.muon, "Muon"))
    }
    microbatch_s: list[float] = []  # by Weft's plan, which is made later
    # DeepSpeed's first: it refuses to share a process with a pipeline that is there already.
    for (stages, optimizer), config in configs.items():
        if stages == 1:
            runs["DeepSpeed, 2 replicas, ZeRO-1", optimizer] = _deepspeed(config, microbatch_s)
    with patch.object(gathering, "usable_flops", lambda *_: (flops_per_s, "given")):
        for (stages, optimizer), config in configs.items():
            title = "Weft, 2 replicas, ZeRO-1" if stages == 1 else "Weft, 2 stages"
            runs[title, optimizer] = _weft(config, microbatch_s)
    steps: dict[tuple[str, str], list[tuple[float, float, float]]] = {key: [] for key in runs}
    for _ in range(WARM_UP + rounds):
        for key, run in runs.items():
            dist.barrier()
            steps[key].append(run.seconds())
    return {key: times[WARM_UP:] for key, times in steps.items()}


def _config(width: int, layers: int, tokens: int, microbatches: int, stages: int, kind: OptimizerKind) -> WeftConfig:
    shape = {
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = WeftConfig(
        model=ModelConfig(overrides=shape, self_check=False),
        pipeline=PipelineConfig(stages=stages, microbatches=microbatches),
        optimizer=OptimizerConfig(kind=kind, clip=0.0),
        train=TrainConfig(microbatch_size=tokens // LENGTH),
    )
    config.data.sequence_length = LENGTH
    config.zero.stage = 1
    return config


def _batch() -> dict[str, Tensor]:
    ids = torch.arange(REAL_LENGTH)[None]
    return {"input_ids": ids, "labels": ids}


def _weft(config: WeftConfig, microbatch_s: list[float]) -> _Run:
    """Return a run of Weft, and append the seconds of a micro-batch in all stages to ``microbatch_s``."""
    engine, *_ = initialize(config=config)
    engine.set_dataiterator(itertools.repeat(_batch()))
    emulate(engine)
    microbatch_s.append(sum(stage.compute_s for stage in engine.plan.costs.stages))

    def step() -> None:
        engine.train_batch()
        engine.sharding.settle()

    run = _Run(step)
    engine.optimizer.reduce = partial(_noted, run, engine.optimizer.reduce)
    return run


def _deepspeed(config: WeftConfig, microbatch_s: Sequence[float]) -> _Run:
    model, count = build_model(config.model, dtype=torch.float32, seed=1).train(), config.pipeline.microbatches
    settings = deepspeed_sections(config, NUM_RANKS)
    optimizer = settings["optimizer"]
    optimizer["params"]["torch_adam"] = True
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model.named_parameters(), 0.0),
        config=settings | {"zero_optimization": {"stage": 1, "reduce_scatter": False}},
    )
    batch = _batch()

    def step() -> None:
        for _ in range(count):
            ends = perf_counter() + microbatch_s[0]
            loss = engine(**batch).loss
            sleep(max(0.0, ends - perf_counter()))  # before the backward, whose last one begins to reduce gradients
            engine.backward(loss)
            engine.step()

    run = _Run(step)
    engine.allreduce_gradients = partial(_noted, run, engine.allreduce_gradients)
    return run


def _noted(run: _Run, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call ``function``, which begins the end of a step."""
    run.backward_ended_s = _now_s()
    return function(*args, **named)


def _now_s() -> tuple[float, float]:
    return perf_counter(), process_time()


def _slowest(key: tuple[str, str], ranks: Sequence[Sequence[tuple[float, ...]]]) -> Timed:
    """Return an engine's times, the largest of any rank, from those of each rank and step."""
    steps = [tuple(map(max, *times)) for times in zip(*ranks, strict=True)]
    return Timed(*key, *zip(*steps, strict=True))


def _row(row: Timed, adamw: Timed) -> dict[str, str]:
    ratios = row.over(adamw)
    return {
        "engine": row.engine,
        "optimiser": row.optimizer,
        "step ms": f"{1e3 * median(row.steps_s):.0f}",
        "of AdamW's": f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        "its end ms": f"{1e3 * median(row.ends_s):.0f}",
        "of AdamW's end": f"{median(row.ends_s) / median(adamw.ends_s):.2f}",
        "processor ms": f"{1e3 * median(row.processor_ends_s):.0f}",
    }
