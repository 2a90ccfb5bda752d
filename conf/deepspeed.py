"""Conversion of a configuration to DeepSpeed's JSON."""

from __future__ import annotations

from typing import Any

from weft.conf.batch import check_world, num_replicas
from weft.conf.schema import OptimizerConfig, OptimizerKind, Precision, WeftConfig


def deepspeed_config(config: WeftConfig, world_size: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run with ``world_size`` processes. See `deepspeed_sections`.

    Raises:
        ValueError: ``world_size`` does not fit the pipeline (see `check_world`).
    """
    return deepspeed_sections(check_world(config, world_size), num_replicas(config, world_size))


def deepspeed_sections(config: WeftConfig, replicas: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run whose batch sizes are known.

    It has no `scheduler` and no monitor, because the engine has its own learning-rate schedules and checkpoints, and
    recipes have their own logs. DeepSpeed prints nothing between steps.
    """
    emitted: dict[str, Any] = {
        "train_batch_size": config.train.microbatch_size * config.pipeline.microbatches * replicas,
        "train_micro_batch_size_per_gpu": config.train.microbatch_size,
        "gradient_accumulation_steps": config.pipeline.microbatches,
        "steps_per_print": None,
        "gradient_clipping": config.optimizer.clip,
        "optimizer": _optimizer(config.optimizer),
        "communication_data_type": config.zero.communication_data_type.value,
        "zero_optimization": {
            "stage": config.zero.stage,
            "overlap_comm": config.zero.overlap_comm,
            "reduce_bucket_size": config.zero.reduce_bucket_size,
            "allgather_bucket_size": config.zero.allgather_bucket_size,
        },
        "zero_allow_untested_optimizer": True,
    }
    return emitted | _precision(config.train.precision)


def _optimizer(config: OptimizerConfig) -> dict[str, Any]:
    """Return the optimizer section. It uses torch's Adam, because DeepSpeed's compiles C++ at its first use."""
    shared = {"lr": config.lr, "weight_decay": config.weight_decay}
    moments = {"betas": list(config.betas), "eps": config.eps}
    muon = {"muon_lr": config.muon_lr or config.lr, "momentum": config.muon_momentum}
    table: dict[OptimizerKind, dict[str, Any]] = {
        OptimizerKind.adamw: {"type": "AdamW", "params": shared | moments | {"torch_adam": True}},
        OptimizerKind.lamb: {"type": "Lamb", "params": shared | moments},
        OptimizerKind.muon: {"type": "Muon", "params": shared | moments | muon},
        OptimizerKind.sgd: {"type": "SGD", "params": shared | {"momentum": config.betas[0]}},
    }
    return table[config.kind]


def _precision(precision: Precision) -> dict[str, Any]:
    table: dict[Precision, dict[str, Any]] = {
        Precision.fp32: {},
        Precision.bf16: {"bf16": {"enabled": True, "check_grad_overflow": False}},
        Precision.fp16: {"fp16": {"enabled": True}},
    }
    return table[precision]
