"""Checks of the settings of distillation."""

from __future__ import annotations

from collections.abc import Iterator

from weft.conf.schema import ChunkedLoss, DistillConfig, WeftConfig


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
