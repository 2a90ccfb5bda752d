"""DeepSpeed's pipeline engines on emulated layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import repeat

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from weft.engine.distributed import init_distributed
from weft.engine.emulation.stage import EmulatedLayer, emulated_hidden, emulated_loss
from weft.tools.benchmarks.peers.case import Case, RankRun
from weft.tools.benchmarks.peers.stepping import time_steps


def run_1f1b(case: Case, timeout_s: float) -> RankRun:
    """One rank of DeepSpeed's 1F1B."""
    return _run(case, timeout_s, PipelineModule)


def run_dualpipev(case: Case, timeout_s: float) -> RankRun:
    """One rank of DeepSpeed's DualPipeV."""
    return _run(case, timeout_s, DualPipeVModule)


def _run(case: Case, timeout_s: float, kind: type[PipelineModule]) -> RankRun:
    init_distributed(timeout_s)
    module = kind(
        layers=[EmulatedLayer(case.work) for _ in range(case.num_layers)],
        num_stages=case.num_ranks,
        loss_fn=emulated_loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.num_microbatches,
            "steps_per_print": 10**9,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    data = repeat((emulated_hidden(case.work), torch.zeros(1)))
    step_s = time_steps(case, lambda: engine.train_batch(data))
    return RankRun(step_s, tuple(_cells(engine)))


def _cells(engine: PipelineEngine) -> Iterator[str]:
    """The engine's own schedule, in our letters; it names buffers, whose order is the micro-batches'."""
    letters = {instructions.ForwardPass: "F", instructions.BackwardPass: "B"}
    counts: Counter[tuple[str, int]] = Counter()
    for commands in engine._train_schedule().steps():
        for command in commands:
            if letter := letters.get(type(command)):
                phase = command.kwargs.get("phase", 0)
                stage = engine.stage_id if phase == 0 else 2 * engine.num_stages - 1 - engine.stage_id
                yield f"{stage}{letter}{counts[letter, phase]}"
                counts[letter, phase] += 1
