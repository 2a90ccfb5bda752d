"""ZB-V: the zero-bubble schedule of a folded pipeline, which splits every backward."""

from __future__ import annotations

from weft.pipeline.action import Op
from weft.pipeline.generators.fifo import Token, assign_microbatches
from weft.pipeline.generators.folded import require_fold
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


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
