"""Tiny Hugging Face models trained with their layers' work shared out, and what one process makes of them."""

from __future__ import annotations

from tests.engine.tiny import tiny_config
from weft.conf.schema import ParallelConfig, WeftConfig

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": True}


def axis_config(
    arch: str = "llama",
    *,
    stages: int = 1,
    zero: int = 0,
    microbatches: int = 4,
    context: int = 1,
    expert: int = 1,
    tensor: int = 1,
    schedule: str = "1f1b",
    checkpointing: bool = False,
) -> WeftConfig:
    """Four layers, clipped, warmed up and decayed."""
    config = tiny_config(schedule, stages=stages, zero=zero, microbatches=microbatches, layers=4)
    config.model.arch = arch
    config.model.gradient_checkpointing = checkpointing
    if arch == "mixtral":
        config.model.overrides |= EXPERTS
    config.data.sequence_length = 12
    config.parallel = ParallelConfig(tensor=tensor, context=context, expert=expert)
    return config
