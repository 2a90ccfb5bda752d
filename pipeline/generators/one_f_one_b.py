"""1F1B and its interleaved form: alternate one forward and one backward, to bound activation memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from weft.pipeline.action import Action, Op, Slot
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


def generate_interleaved(placement: Placement, num_microbatches: int, launch_together: int = 0) -> Schedule:
    """Generate Megatron's interleaved 1F1B, for any number of micro-batches.

    Micro-batches are grouped in rounds of at least P: each rank runs a round through all of its
    chunks before it starts the next. With rounds of equal size this is the order of torch's
    ``ScheduleInterleaved1F1B``; otherwise the first rounds have one micro-batch more. Longer
    rounds hold more activations and give a chunk's collectives more compute to overlap with;
    a single round is the breadth-first order (Centauri section 3.2.3, figure 7).

    Args:
        launch_together: minimum number of micro-batches of a round; 0 means P.

    Raises:
        ValueError: the placement is not interleaved over all ranks, or rounds would be shorter than P.
    """
    chunks = len(placement.legs)
    if set(placement.legs) != {"d"} or len(placement.groups) != 1 or chunks < 2:
        raise ValueError(
            f"pipeline.schedule=interleaved: it needs an interleaved placement (legs 'dd' or more over all ranks), the "
            f"placement has legs {placement.legs!r} over groups {placement.groups}; "
            f"choose pipeline.chunks_per_rank of at least 2, or schedule=1f1b or auto"
        )
    if launch_together and launch_together < placement.num_ranks:
        raise ValueError(
            f"pipeline.launch_together={launch_together}: a round of the interleaved schedule has at least "
            f"{placement.num_ranks} micro-batches, one for each rank; raise it or choose 0"
        )
    rounds = _rounds(launch_together or placement.num_ranks, num_microbatches)
    rows = tuple(_row(rank, placement.num_ranks, chunks, rounds) for rank in range(placement.num_ranks))
    return Schedule("interleaved", placement, num_microbatches, rows)


def _row(rank: int, num_ranks: int, chunks: int, rounds: list[range]) -> tuple[Slot, ...]:
    forwards: list[Slot] = [(Action(Op.F, chunk * num_ranks + rank, m),) for chunk, m in _visits(rounds, range(chunks))]
    backwards: list[Slot] = [
        (Action(Op.B, chunk * num_ranks + rank, m),) for chunk, m in _visits(rounds, range(chunks)[::-1])
    ]
    # 1. Warm-up: the first round up to the last chunk, and two forwards for each rank below.
    warmup = min((chunks - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank), len(forwards))
    row = forwards[:warmup]
    # 2. Steady: one forward, one backward.
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    # 3. Cool-down: the backwards that are left.
    return tuple(row + backwards[len(forwards) - warmup :])


def _rounds(least: int, num_microbatches: int) -> list[range]:
    """Divide the micro-batches into as many rounds of at least ``least`` as possible."""
    count = max(1, num_microbatches // least)
    size, longer = divmod(num_microbatches, count)
    bounds = [number * size + min(number, longer) for number in range(count + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _visits(rounds: list[range], chunks: range) -> Iterator[tuple[int, int]]:
    for members in rounds:
        for chunk in chunks:
            for microbatch in members:
                yield chunk, microbatch
