"""Checks of the settings of the optimiser, of activation memory and of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from weft.conf.schema import (
    Attention,
    ChunkedLoss,
    DistillConfig,
    Float8,
    Kernels,
    OptimizerConfig,
    OptimizerKind,
    OptimizerState,
    PairChoice,
    Precision,
    Quantization,
    Recompute,
    WeftConfig,
)
from weft.conf.schema.ranges import SHARE


def optimizer_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting of the optimiser that is wrong, unused, or in conflict with an axis."""
    parallel, optimizer = config.parallel, config.optimizer
    if len(optimizer.betas) != 2 or any(beta not in SHARE for beta in optimizer.betas):
        yield f"optimizer.betas={optimizer.betas}: not two numbers {SHARE}; give two, such as [0.9, 0.95]"
    needs = {OptimizerKind.lamb: "the norm of ", OptimizerKind.muon: ""}
    if optimizer.kind in needs and (parallel.tensor > 1 or parallel.expert > 1):
        axis, size = ("tensor", parallel.tensor) if parallel.tensor > 1 else ("expert", parallel.expert)
        yield (
            f"optimizer.kind={optimizer.kind.value}: its step depends on {needs[optimizer.kind]}a whole matrix, which "
            f"parallel.{axis}={size} cuts; set optimizer.kind=adamw, or the axis to 1"
        )
    yield from _state_problems(config)
    for name in ("muon_lr", "muon_momentum"):
        value = getattr(optimizer, name)
        if optimizer.kind is not OptimizerKind.muon and value != getattr(OptimizerConfig(), name):
            yield f"optimizer.{name}={value:g}: only optimizer.kind=muon uses it; set that, or leave it out"


def _state_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each conflict of moments that are not fp32. Shards must not cut the blocks of 8-bit ones."""
    parallel, optimizer = config.parallel, config.optimizer
    name = f"optimizer.state={optimizer.state.value}"
    if optimizer.state is OptimizerState.fp32:
        return
    if optimizer.kind is not OptimizerKind.adamw:
        yield f"{name}: optimizer.kind={optimizer.kind.value} has fp32 state only; set optimizer.kind=adamw"
    if optimizer.state is OptimizerState.bf16:
        return
    for axis, size in (("tensor", parallel.tensor), ("expert", parallel.expert)):
        if size > 1:
            yield (
                f"{name}: parallel.{axis}={size} cuts matrices, and the blocks that share a scale with them; set "
                "optimizer.state=fp32, or the axis to 1"
            )
    if find_spec("bitsandbytes") is None:
        yield f"{name}: bitsandbytes is not installed; run pip install bitsandbytes, or set optimizer.state=fp32"


def memory_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting that recomputation or offload does not support."""
    yield from _recompute(config)
    if config.pipeline.offload:
        yield from _offload(config)


def _offload(config: WeftConfig) -> Iterator[str]:
    pipeline, name = config.pipeline, "pipeline.offload=true"
    shared = {f"parallel.{axis}": getattr(config.parallel, axis) for axis in ("tensor", "context", "expert")}
    for setting, size in {**shared, "comm.cell": config.comm.cell}.items():
        if size > 1:
            yield f"{name}: it does not support {setting}={size}; set {setting}=1, or pipeline.offload=false"
    if config.zero.stage == 3:
        yield f"{name}: it does not support zero.stage=3; set a lower stage, or pipeline.offload=false"
    if pipeline.adapt:
        yield f"{name}: it does not support pipeline.adapt=true; set one of them to false"
    if pipeline.recompute is Recompute.auto:
        yield (
            f"{name}: pipeline.recompute=auto does not weigh it; set pipeline.recompute=elementwise, attention, layers "
            "or none"
        )
    if pipeline.pairs is PairChoice.always:
        yield f"{name}: pipeline.pairs=always keeps strand pairs, which it splits; set pipeline.pairs=auto or never"
    if not pipeline.memory_cap_bytes:
        yield f"{name}: pipeline.memory_cap_bytes=0 is no cap, which needs none; set the cap, or pipeline.offload=false"
    if pipeline.schedule.name in ("file", "dualpipev"):
        yield f"{name}: pipeline.schedule={pipeline.schedule.name} is not supported; set pipeline.schedule=auto"


def level_problem(config: WeftConfig, level: Recompute) -> str:
    """Return why a level of recomputation, which is not auto, is not supported, or an empty string if it is."""
    if level is not Recompute.elementwise:
        return ""
    name, others = "pipeline.recompute=elementwise", "set pipeline.recompute=attention or layers"
    if config.model.kernels is Kernels.fused:
        return f"{name}: model.kernels=fused rotates products in place, which are kept; {others}, or model.kernels=none"
    if config.model.attn_implementation is Attention.flex_attention:
        return (
            f"{name}: model.attn_implementation=flex_attention is compiled, so its result cannot be recorded; {others},"
            " or model.attn_implementation=sdpa"
        )
    return ""


def _recompute(config: WeftConfig) -> Iterator[str]:
    pipeline, parallel = config.pipeline, config.parallel
    if pipeline.recompute in (Recompute.none, Recompute.layers):
        return
    if problem := level_problem(config, pipeline.recompute):
        yield problem
    name = f"pipeline.recompute={pipeline.recompute.name}"
    shared = {"tensor": parallel.tensor, "context": parallel.context, "expert": parallel.expert}
    for axis, size in shared.items():
        if size > 1:
            yield (
                f"{name}: parallel.{axis}={size} ranks share layers, whose collectives a choice per stage would "
                "repeat; set pipeline.recompute=layers or none"
            )
    if pipeline.recompute is Recompute.auto and pipeline.costs_file:
        yield (
            f"{name}: pipeline.costs_file={pipeline.costs_file} has costs of one choice only; "
            "leave it empty, or choose none, elementwise, attention or layers"
        )


def float8_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting with which fp8 linear layers are not supported."""
    name, precision, lora = f"model.float8={config.model.float8.value}", config.train.precision, config.model.lora
    if config.model.float8 is Float8.none:
        return
    if precision is not Precision.bf16:
        yield f"{name}: it does not support train.precision={precision.value}; set train.precision=bf16, or float8=none"
    if lora.enabled and lora.quantize is not Quantization.none:
        yield (
            f"{name}: model.lora.quantize={lora.quantize.value} has quantised the weights already; set one of them to "
            "none"
        )


def distill_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting of distillation that is unused, or in conflict with the model's."""
    distill, usual = config.distill, DistillConfig()
    if not distill.enabled:
        for name, value in vars(distill).items():
            if value != getattr(usual, name):
                yield f"distill.{name}={value}: only distill.enabled=true uses it; set that, or leave {name} out"
        return
    if config.model.chunked_loss is ChunkedLoss.always:
        yield (
            "model.chunked_loss=always: the divergence from a teacher needs whole logits; set model.chunked_loss=auto, "
            "or a smaller train.microbatch_size"
        )
    if not distill.top_k and not distill.tail:
        yield "distill.tail=false: distill.top_k=0 compares the whole vocabulary; set distill.top_k, or leave tail out"
    if config.model.overrides.get("output_router_logits"):
        yield (
            "model.overrides.output_router_logits=true: the loss of distillation has no part for routers; "
            "set it to false"
        )
