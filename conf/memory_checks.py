"""Checks of the settings that trade time for activation memory."""

from __future__ import annotations

from collections.abc import Iterator

from weft.conf.schema import PairChoice, Recompute, WeftConfig


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
        yield f"{name}: pipeline.recompute=auto does not weigh it; set pipeline.recompute=attention, layers or none"
    if pipeline.pairs is PairChoice.always:
        yield f"{name}: pipeline.pairs=always keeps strand pairs, which it splits; set pipeline.pairs=auto or never"
    if not pipeline.memory_cap_bytes:
        yield f"{name}: pipeline.memory_cap_bytes=0 is no cap, which needs none; set the cap, or pipeline.offload=false"
    if pipeline.schedule.name in ("file", "dualpipev"):
        yield f"{name}: pipeline.schedule={pipeline.schedule.name} is not supported; set pipeline.schedule=auto"


def _recompute(config: WeftConfig) -> Iterator[str]:
    pipeline, parallel = config.pipeline, config.parallel
    if pipeline.recompute in (Recompute.none, Recompute.layers):
        return
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
            "leave it empty, or choose none, attention or layers"
        )
