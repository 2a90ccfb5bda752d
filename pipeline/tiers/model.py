"""The model tier: how many micro-batches of a chunk to launch together (Centauri equation 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Inputs of equation 2 for one virtual stage.

    Attributes:
        c_ag, c_rs: all-gather of its weights, reduce-scatter of its gradients.
        c_fw, c_bw: forward and backward of one micro-batch.
        m: activation bytes that a forward saves.
        memory: bytes available for activations (M).
        mb: micro-batches per step.
    """

    c_ag: float
    c_rs: float
    c_fw: float
    c_bw: float
    m: float
    memory: float
    mb: int


@dataclass(frozen=True)
class ModelPlan:
    """Micro-batches launched together in forward (L1) and backward (L2), and the exposed communication (T)."""

    l1: int
    l2: int
    uncovered: float
    reason: str


def model_tier(c: ModelCosts) -> ModelPlan:
    """Minimise exposed communication by equation 2; on a tie take the fewest micro-batches, to save memory.

    Raises:
        ValueError: the memory does not fit a single forward, or there is no micro-batch.
    """
    if c.mb < 1 or c.m > c.memory:
        raise ValueError(f"{c.mb} micro-batches of {c.m:g} B each in {c.memory:g} B: not even one fits; free memory")
    uncovered, l1, l2 = min(_candidates(c))  # L2 grows by no more than L1 falls, so the least L1 takes the fewest
    cap = _cap(c)
    wanted = _wanted(c.c_ag, c.c_fw, c.mb) + _wanted(c.c_rs, c.c_bw, c.mb)
    limit = "memory" if cap < c.mb and l1 + l2 < wanted else "the number of micro-batches"
    reason = "all is covered" if uncovered <= 0 else f"{uncovered:.3g} stays uncovered: {limit} allows no more"
    return ModelPlan(l1, l2, uncovered, f"L1 {l1}, L2 {l2} of {c.mb}: {reason}")


def _candidates(c: ModelCosts) -> Iterator[tuple[float, int, int]]:
    """Yield (T, L1, L2) for each useful L1: up to the number that covers the all-gather."""
    cap = _cap(c)
    for l1 in range(min(_wanted(c.c_ag, c.c_fw, c.mb), cap) + 1):
        l2 = min(_wanted(c.c_rs, c.c_bw, c.mb), cap, c.mb - l1)
        yield max(c.c_ag - l1 * c.c_fw, 0.0) + max(c.c_rs - l2 * c.c_bw, 0.0), l1, l2


def _cap(c: ModelCosts) -> int:
    """Return the number of micro-batches whose activations fit into memory."""
    return c.mb if c.m * c.mb <= c.memory else int(c.memory // c.m)


def _wanted(communication: float, compute: float, most: int) -> int:
    """Return the number of micro-batches whose compute covers a collective, at most ``most``."""
    if communication <= 0:
        return 0
    return ceil(min(communication / compute, most)) if compute > 0 else most
