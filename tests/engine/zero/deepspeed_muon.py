"""The losses of DeepSpeed's own engine with its Muon, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from tests.engine.tiny import batches, own_loss
from weft.conf.schema import WeftConfig


def orthogonalize_in_fp32(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process in which Newton-Schulz iterations, DeepSpeed's and ours, run in fp32.

    Where the processor supports fp16 they run in it, and the order of a gradient's sum then changes losses by 2e-5.
    """
    from deepspeed.runtime.zero.muon import original_muon

    original_muon.ns_compute_dtype = lambda _method="gram": torch.float32
    return function(*args)


def deepspeed_losses(config: WeftConfig, count: int, zero_stages: list[int], steps: int) -> list[list[float]]:
    """Return the losses of steps of ``count`` micro-batches, at each stage of DeepSpeed's ZeRO."""
    import deepspeed

    from weft.conf.deepspeed import deepspeed_sections
    from weft.engine.deepspeed.construction import learning_rate, parameter_groups
    from weft.engine.distributed import init_distributed
    from weft.engine.stages.files.loading import build_model

    torch.compiler.set_stance("force_eager")  # to compile Newton-Schulz takes a minute
    init_distributed(60)
    losses = []
    for zero in zero_stages:
        model = build_model(config.model, dtype=torch.float32, seed=config.train.seed).train()
        settings = deepspeed_sections(config, 1)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model.named_parameters(), config.optimizer.weight_decay),
            lr_scheduler=learning_rate(config.optimizer, config.train.steps),
            config=settings
            | {
                "gradient_accumulation_steps": count,
                "train_batch_size": count * config.train.microbatch_size,
                "zero_optimization": {"stage": zero, "reduce_scatter": False},
                "optimizer": settings["optimizer"] | {"params": settings["optimizer"]["params"] | {"torch_adam": True}},
            },
        )
        data = batches(0, 1)
        losses.append([_step(engine, list(itertools.islice(data, count))) for _ in range(steps)])
        engine.destroy()
    return losses


def _step(engine, step: list[dict[str, torch.Tensor]]) -> float:
    items = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step))
    total = 0.0
    for batch in step:
        loss = own_loss(engine, batch, items, len(step))
        engine.backward(loss * len(step))  # DeepSpeed divides by the number of micro-batches
        engine.step()
        total += loss.item()
    return total
