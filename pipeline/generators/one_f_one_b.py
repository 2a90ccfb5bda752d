"""1F1B: alternate one forward and one backward, to bound activation memory by the pipeline's depth."""

from __future__ import annotations

from collections.abc import Iterator

from weft.pipeline.action import Op
from weft.pipeline.generators.fifo import Token, assign_microbatches
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def generate_1f1b(placement: Placement, num_microbatches: int) -> Schedule:
    """Generate 1F1B (PipeDream-Flush) for any number of micro-batches; rank r of P holds P - r of them.

    Raises:
        ValueError: the placement has several stages per rank.
    """
    if placement.legs != "d":
        raise ValueError(
            f"pipeline.schedule=1f1b: it needs placement=straight (one stage per rank), the placement has legs "
            f"{placement.legs!r}; choose placement=straight, or schedule=interleaved, w, zbv or auto"
        )
    ranks = range(placement.num_ranks)
    rows = (
        assign_microbatches(((token,) for token in _tokens(r, placement, num_microbatches)), num_microbatches)
        for r in ranks
    )
    return Schedule("1f1b", placement, num_microbatches, tuple(rows))


def _tokens(rank: int, placement: Placement, num_microbatches: int) -> Iterator[Token]:
    warmup = min(placement.num_ranks - 1 - rank, num_microbatches)
    # 1. Warm-up: one forward for each rank below.
    yield from [(Op.F, rank)] * warmup
    # 2. Steady: one forward, one backward.
    yield from [(Op.F, rank), (Op.B, rank)] * (num_microbatches - warmup)
    # 3. Cool-down: the backwards that are left.
    yield from [(Op.B, rank)] * warmup
