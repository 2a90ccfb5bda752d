"""DeepSpeed's engines on emulated layers: pipelines, and ZeRO without a pipeline and with one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from benchmarks.peers.case import EngineCase, RankRun, ZeroCase, ZeroRun, time_computes, time_steps
from benchmarks.peers.emulated_stage import EmulatedLayer, EmulatedWork, emulated_hidden, emulated_loss
from weft.engine.distributed import init_distributed


def run(case: EngineCase, timeout_s: float, *, is_folded: bool) -> RankRun:
    """Run one rank of DeepSpeed's 1F1B, or of its DualPipeV."""
    init_distributed(timeout_s)
    kind = DualPipeVModule if is_folded else PipelineModule
    engine, step = _pipeline(case.work, case.num_layers, case.num_ranks, _config(case.num_microbatches), kind)
    return RankRun(time_steps(case, step), tuple(_cells(engine)))


def run_sharded(case: ZeroCase, stage: int) -> list[ZeroRun]:
    """Run one rank of ZeRO-``stage`` over all ranks."""
    init_distributed(case.timeout_s)
    work = case.work(case.compute_s[0])
    model = nn.Sequential(*(EmulatedLayer(work) for _ in range(case.num_layers)))
    config = _config(case.num_microbatches) | _zero(case, stage)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    hidden = emulated_hidden(work)

    def step() -> None:
        for _ in range(case.num_microbatches):
            engine.backward(emulated_loss(engine(hidden)))
            engine.step()

    return time_computes(case, _layers(engine), step)


def run_pipelined(case: ZeroCase, num_stages: int) -> list[ZeroRun]:
    """Run one rank of ZeRO-1 over the replicas of a 1F1B pipeline.

    A rank has a share of the layers. For the same global batch it has as many times the
    micro-batches, so its compute is the same as without a pipeline.
    """
    init_distributed(case.timeout_s)
    config = _config(case.num_microbatches * num_stages) | _zero(case, 1)
    engine, step = _pipeline(case.work(case.compute_s[0]), case.num_layers, num_stages, config)
    return time_computes(case, _layers(engine), step)


def _pipeline(
    work: EmulatedWork, num_layers: int, num_stages: int, config: dict[str, Any], kind: type = PipelineModule
) -> tuple[PipelineEngine, Callable[[], object]]:
    module = kind(
        layers=[EmulatedLayer(work) for _ in range(num_layers)],
        num_stages=num_stages,
        loss_fn=emulated_loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    data = repeat((emulated_hidden(work), torch.zeros(1)))
    return engine, lambda: engine.train_batch(data)


def _layers(engine: nn.Module) -> list[EmulatedLayer]:
    return [module for module in engine.modules() if isinstance(module, EmulatedLayer)]


def _config(num_microbatches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_microbatches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }


def _zero(case: ZeroCase, stage: int) -> dict[str, Any]:
    """Return settings with buckets of one layer, and every overlap that DeepSpeed enables."""
    return {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": case.layer_elements,
            "allgather_bucket_size": case.layer_elements,
            "stage3_prefetch_bucket_size": case.layer_elements,
            "stage3_param_persistence_threshold": 0,
        },
    }


def _cells(engine: PipelineEngine) -> Iterator[str]:
    """Yield the engine's own schedule in our text form.

    It numbers buffers in place of micro-batches; their order gives the micro-batches.
    """
    letters = {instructions.ForwardPass: "F", instructions.BackwardPass: "B"}
    counts: Counter[tuple[str, int]] = Counter()
    for commands in engine._train_schedule().steps():
        for command in commands:
            if letter := letters.get(type(command)):
                phase = command.kwargs.get("phase", 0)
                stage = engine.stage_id if phase == 0 else 2 * engine.num_stages - 1 - engine.stage_id
                yield f"{stage}{letter}{counts[letter, phase]}"
                counts[letter, phase] += 1
