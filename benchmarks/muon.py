"""The end of a step with Muon over that with AdamW, in Weft and in DeepSpeed at ZeRO-1."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, process_time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import finish, parse, show
from weft.conf.deepspeed import deepspeed_sections
from weft.conf.schema import ModelConfig, OptimizerConfig, OptimizerKind, PipelineConfig, TrainConfig, WeftConfig
from weft.engine.deepspeed.construction import parameter_groups
from weft.engine.distributed import init_distributed
from weft.engine.initialize import initialize
from weft.engine.stages.files.loading import build_model
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

NUM_RANKS, WARM_UP = 2, 2
GOAL = 1.02
"""Largest ratio of a whole step with Muon to one with AdamW."""


@dataclass(frozen=True)
class Timed:
    """The fastest of a rank's steps, since other work on the machine only adds time.

    Attributes:
        step_s: seconds of the step.
        end_s: seconds of its end: from the last backward to the new weights.
        processor_s, processor_end_s: processor seconds of both.
    """

    engine: str
    optimizer: str
    step_s: float
    end_s: float
    processor_s: float
    processor_end_s: float


@dataclass
class _Run:
    """An engine's step, and when the last backward of the latest step ended, by both clocks."""

    step: Callable[[], None]
    backward_ended_s: tuple[float, float] = (0.0, 0.0)

    def seconds(self) -> tuple[float, float, float, float]:
        """Run a step, and return its seconds, those of its end, and the processor's of both."""
        start, start_processor = _now_s()
        self.step()
        end, end_processor = _now_s()
        backward, backward_processor = self.backward_ended_s
        return end - start, end - backward, end_processor - start_processor, end_processor - backward_processor


def main(argv: Sequence[str]) -> int:
    """Run every engine in turn, a step each, and return 1 if a step of Weft with Muon exceeds the goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks muon", description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="hidden size of the Llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step and pipeline")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each engine")
    args = parse(parser, argv)
    sizes = (args.width, args.layers, args.tokens, args.microbatches)
    found = run_ranks(NUM_RANKS, _measured, *sizes, args.rounds, timeout_s=900)
    rows = [_slowest(ranks) for ranks in zip(*found, strict=True)]
    of_adamw = {row.engine: row for row in rows if row.optimizer == "AdamW"}
    table = [_row(row, of_adamw[row.engine]) for row in rows]
    shape = f"{args.layers} layers of {args.width}, {args.microbatches} micro-batches of {args.tokens} tokens"
    show(table_of(table, f"Llama of {shape}", left=2))
    worst = max(row.step_s / of_adamw[row.engine].step_s for row in rows if row.engine.startswith("Weft"))
    print(f"goal: a step of Weft with Muon takes at most {GOAL} of one with AdamW: {worst:.3f}")
    return finish(args, "muon", rows, met=worst <= GOAL)


def _measured(width: int, layers: int, tokens: int, microbatches: int, rounds: int) -> list[Timed]:
    """Return the times of this rank. Engines take turns, so that they share whatever else the machine does."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # DeepSpeed's Newton-Schulz, as in Weft, without minutes of compilation
    init_distributed()  # DeepSpeed's own would compile an operator for minutes
    runs: dict[tuple[str, str], _Run] = {}
    # DeepSpeed's first: it refuses to share a process with a pipeline that is there already.
    for title, make, stages in (
        ("DeepSpeed, 2 replicas, ZeRO-1", _deepspeed, 1),
        ("Weft, 2 replicas, ZeRO-1", _weft, 1),
        ("Weft, 2 stages", _weft, 2),
    ):
        for kind, optimizer in ((OptimizerKind.adamw, "AdamW"), (OptimizerKind.muon, "Muon")):
            runs[title, optimizer] = make(_config(width, layers, tokens, microbatches, stages, kind), tokens)
    steps: dict[tuple[str, str], list[tuple[float, ...]]] = {key: [] for key in runs}
    for _ in range(WARM_UP + rounds):
        for key, run in runs.items():
            dist.barrier()
            steps[key].append(run.seconds())
    fastest = {key: map(min, *times[WARM_UP:]) for key, times in steps.items()}
    return [Timed(*key, *times) for key, times in fastest.items()]


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
        train=TrainConfig(microbatch_size=1),
    )
    config.data.sequence_length = tokens
    config.zero.stage = 1
    return config


def _batch(tokens: int) -> dict[str, Tensor]:
    ids = torch.arange(tokens)[None] % 512
    return {"input_ids": ids, "labels": ids}


def _weft(config: WeftConfig, tokens: int) -> _Run:
    engine, *_ = initialize(config=config)
    engine.set_dataiterator(itertools.repeat(_batch(tokens)))

    def step() -> None:
        engine.train_batch()
        engine.sharding.settle()

    run = _Run(step)
    engine.optimizer.reduce = partial(_noted, run, engine.optimizer.reduce)
    return run


def _deepspeed(config: WeftConfig, tokens: int) -> _Run:
    model, count = build_model(config.model, dtype=torch.float32, seed=1).train(), config.pipeline.microbatches
    settings = deepspeed_sections(config, NUM_RANKS)
    optimizer = settings["optimizer"]
    optimizer["params"]["torch_adam"] = True
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model.named_parameters(), 0.0),
        config=settings | {"zero_optimization": {"stage": 1, "reduce_scatter": False}},
    )
    batch = _batch(tokens)

    def step() -> None:
        for _ in range(count):
            engine.backward(engine(**batch).loss)
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


def _slowest(ranks: Sequence[Timed]) -> Timed:
    """Return the largest time of any rank."""
    first, names = ranks[0], ("step_s", "end_s", "processor_s", "processor_end_s")
    return replace(first, **{name: max(getattr(rank, name) for rank in ranks) for name in names})


def _row(row: Timed, adamw: Timed) -> dict[str, str]:
    return {
        "engine": row.engine,
        "optimiser": row.optimizer,
        "step ms": f"{1e3 * row.step_s:.0f}",
        "of AdamW's": f"{row.step_s / adamw.step_s:.2f}",
        "its end ms": f"{1e3 * row.end_s:.0f}",
        "of AdamW's end": f"{row.end_s / adamw.end_s:.2f}",
        "processor ms": f"{1e3 * row.processor_s:.0f}",
        "of its end": f"{1e3 * row.processor_end_s:.0f}",
    }
