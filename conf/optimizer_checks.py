"""Checks of the optimiser's settings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from weft.conf.schema import OptimizerConfig, OptimizerKind, OptimizerState, WeftConfig
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
    """Yield a line for each conflict of 8-bit moments, whose blocks shards must not cut."""
    parallel, optimizer = config.parallel, config.optimizer
    name = f"optimizer.state={optimizer.state.value}"
    if optimizer.state is OptimizerState.fp32:
        return
    if optimizer.kind is not OptimizerKind.adamw:
        yield f"{name}: optimizer.kind={optimizer.kind.value} has fp32 state only; set optimizer.kind=adamw"
    for axis, size in (("tensor", parallel.tensor), ("expert", parallel.expert)):
        if size > 1:
            yield (
                f"{name}: parallel.{axis}={size} cuts matrices, and the blocks that share a scale with them; set "
                "optimizer.state=fp32, or the axis to 1"
            )
    if find_spec("bitsandbytes") is None:
        yield f"{name}: bitsandbytes is not installed; run pip install bitsandbytes, or set optimizer.state=fp32"
