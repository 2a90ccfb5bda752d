"""Folded schedules, which have two chunks per rank, down and back up: DualPipeV and ZB-V."""

from __future__ import annotations

from collections import deque

from weft.pipeline.action import Op
from weft.pipeline.generators.fifo import Token, assign_microbatches
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def require_fold(schedule: str, placement: Placement) -> None:
    """Check that ``placement`` is one fold over all ranks.

    Raises:
        ValueError: it is not. The message names valid placements.
    """
    if placement.legs != "du" or len(placement.groups) != 1:
        raise ValueError(
            f"pipeline.schedule={schedule}: it needs placement=fold (legs 'du' over all ranks), the placement has "
            f"legs {placement.legs!r} over groups {placement.groups}; choose placement=fold or schedule=auto"
        )


def generate_dualpipev(placement: Placement, num_microbatches: int) -> Schedule:
    """Generate DualPipeV in its eight steps, for at least 2P micro-batches; each rank holds 2P + 1 chunk activations.

    The same order as DeepSeek's DualPipe repository and torch's ``ScheduleDualPipeV``.

    Raises:
        ValueError: the placement is not a fold with legs ``du``.
    """
    require_fold("dualpipev", placement)
    rows = tuple(
        assign_microbatches(_slots(rank, placement.num_ranks, num_microbatches), num_microbatches)
        for rank in range(placement.num_ranks)
    )
    return Schedule("dualpipev", placement, num_microbatches, rows)


def _slots(rank: int, num_ranks: int, num_microbatches: int) -> list[tuple[Token, ...]]:
    """Return one rank's row; the step numbers are DualPipeV's."""
    down, up = rank, 2 * num_ranks - 1 - rank  # the rank's two stages
    below = num_ranks - 1 - rank  # ranks between this one and the bottom of the fold
    row: list[tuple[Token, ...]] = []
    deferred: deque[Token] = deque()  # weight gradients put off, oldest first

    def one(op: Op, stage: int) -> None:
        row.append(((op, stage),))
        if op is Op.I:
            deferred.append((Op.W, stage))

    def pair(forward: int, backward: int) -> None:
        row.append(((Op.F, forward), (Op.B, backward)))

    def run_deferred() -> None:
        if deferred:
            row.append((deferred.popleft(),))

    # 1. F0
    for _ in range(2 * below):
        one(Op.F, down)
    # 2. F0 F1
    for _ in range(rank + 1):
        one(Op.F, down)
        one(Op.F, up)
    # 3. I1 W1 F1
    for _ in range(below):
        one(Op.I, up)
        run_deferred()
        one(Op.F, up)
    # 4. (F0 B1) (F1 B0), the steady state; the bottom rank runs its first pair one half after the
    #    other, because the next stage waits for the forward.
    for turn in range(num_microbatches - 2 * num_ranks + rank + 1):
        if turn == 0 and below == 0:
            one(Op.F, down)
            one(Op.B, up)
        else:
            pair(down, up)
        pair(up, down)
    # 5. B1 (F1 B0)
    for _ in range(below):
        one(Op.B, up)
        pair(up, down)
    # 6. B1 B0, the second half with deferred weight gradients
    backwards = [up, down] * (rank + 1)
    split_from = 2 * ((rank + 1) // 2) + (rank + 1) % 2
    for position, stage in enumerate(backwards):
        one(Op.B if position < split_from else Op.I, stage)
    # 7. W0 B0
    for _ in range(below):
        run_deferred()
        one(Op.I, down)
    # 8. W0
    while deferred:
        run_deferred()
    return row


def generate_zbv(placement: Placement, num_microbatches: int) -> Schedule:
    """Generate ZB-V for any number of micro-batches; each rank holds 2P chunk activations.

    The same order as in "Pipeline Parallelism with Controllable Memory" and torch's
    ``ScheduleZBVZeroBubble``. It has no bubbles after the warm-up if F, I and W take the same time.

    Raises:
        ValueError: the placement is not a fold with legs ``du``.
    """
    require_fold("zbv", placement)
    rows = tuple(
        assign_microbatches(
            ((token,) for token in _tokens(rank, placement.num_ranks, num_microbatches)), num_microbatches
        )
        for rank in range(placement.num_ranks)
    )
    return Schedule("zbv", placement, num_microbatches, rows)


def _tokens(rank: int, num_ranks: int, num_microbatches: int) -> list[Token]:
    """Return one rank's row for at least 2P - 1 micro-batches, the number that fills the pipeline."""
    filled = max(num_microbatches, 2 * num_ranks - 1)
    down, up = rank, 2 * num_ranks - 1 - rank  # the rank's two stages
    upward = num_ranks - rank  # ranks from here to the bottom of the fold, this one included
    late = filled - (up - rank) - rank  # forwards of `down` that remain after the warm-up
    backward_down = [(Op.I, down), (Op.W, down)]
    backward_up = [(Op.I, up), (Op.W, up)]

    # 1. Warm-up: enough forwards to stay busy until the first one returns from the bottom.
    row: list[Token] = [(Op.F, down)] * (2 * upward - 1)
    # 2. Forwards of both chunks, until the first gradient arrives.
    row += [(Op.F, up), (Op.F, down)] * rank
    # 3. One forward and one backward of the upward chunk.
    row += [(Op.F, up), *backward_up] * upward
    # 4. Steady: one forward and one backward of each chunk, forwards of `down` while they last.
    row += [(Op.F, down), *backward_down, (Op.F, up), *backward_up] * late
    row += [*backward_down, (Op.F, up), *backward_up] * (filled - num_ranks - late)
    # 5. Cool-down: input gradients first; weight gradients fill the bubbles.
    row += [(Op.I, down), (Op.I, up)] * rank
    row += backward_down * upward
    row += [(Op.W, up)] * rank
    row += [(Op.W, down)] * rank
    return row
