"""DeepSpeed's ZeRO on emulated layers, without a pipeline and with one."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from weft.engine.distributed import init_distributed
from weft.engine.emulation.stage import EmulatedLayer, emulated_hidden, emulated_loss
from weft.tools.benchmarks.peers.zero_case import ZeroCase, ZeroRun, time_computes


def run_sharded(case: ZeroCase, stage: int) -> list[ZeroRun]:
    """One rank of ZeRO-``stage`` over all ranks."""
    init_distributed(case.timeout_s)
    work = case.work(case.compute_s[0])
    model = nn.Sequential(*(EmulatedLayer(work) for _ in range(case.num_layers)))
    engine, *_ = deepspeed.initialize(model=model, config=_config(case, stage, case.num_microbatches))
    layers = [module for module in engine.modules() if isinstance(module, EmulatedLayer)]
    hidden = emulated_hidden(work)

    def step() -> None:
        for _ in range(case.num_microbatches):
            engine.backward(emulated_loss(engine(hidden)))
            engine.step()

    return time_computes(case, layers, step)


def run_pipelined(case: ZeroCase, num_stages: int) -> list[ZeroRun]:
    """One rank of ZeRO-1 over the replicas of a 1F1B pipeline.

    A rank has a share of the layers and, for the same global batch, as many times the
    micro-batches: its compute is the same as without a pipeline.
    """
    init_distributed(case.timeout_s)
    work = case.work(case.compute_s[0])
    module = PipelineModule(
        layers=[EmulatedLayer(work) for _ in range(case.num_layers)],
        num_stages=num_stages,
        loss_fn=emulated_loss,
        partition_method="uniform",
    )
    config = _config(case, 1, case.num_microbatches * num_stages)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    data = repeat((emulated_hidden(work), torch.zeros(1)))
    layers = [module for module in engine.modules() if isinstance(module, EmulatedLayer)]
    return time_computes(case, layers, lambda: engine.train_batch(data))


def _config(case: ZeroCase, stage: int, num_microbatches: int) -> dict[str, Any]:
    """Buckets of one layer, and every overlap that DeepSpeed has switched on."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_microbatches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
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
