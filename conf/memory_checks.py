"""Checks of the settings that trade time for activation memory."""

from __future__ import annotations

from collections.abc import Iterator

from weft.conf.schema import Recompute, WeftConfig


def memory_problems(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each setting that recomputation does not support."""
    pipeline, parallel = config.pipeline, config.parallel
    if pipeline.recompute is Recompute.none:
        return
    name = f"pipeline.recompute={pipeline.recompute.name}"
    if config.model.gradient_checkpointing:
        yield f"{name}: model.gradient_checkpointing=true recomputes every layer already; set only one of them"
    shared = {"tensor": parallel.tensor, "context": parallel.context, "expert": parallel.expert}
    for axis, size in shared.items():
        if size > 1:
            yield (
                f"{name}: parallel.{axis}={size} ranks share layers, whose collectives a choice per stage would "
                "repeat; set model.gradient_checkpointing=true, or pipeline.recompute=none"
            )
    if pipeline.recompute is Recompute.auto and pipeline.costs_file:
        yield (
            f"{name}: pipeline.costs_file={pipeline.costs_file} has costs of one choice only; "
            "leave it empty, or choose none, attention or layers"
        )
