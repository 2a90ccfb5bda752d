"""ZB-V: the zero-bubble schedule of a folded pipeline, which splits every backward."""

from __future__ import annotations

from weft.pipeline.action import Op
from weft.pipeline.generators.fifo import Token, number
from weft.pipeline.generators.folded import require_fold
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def generate_zbv(placement: Placement, num_microbatches: int) -> Schedule:
    """ZB-V for any number of micro-batches; holds 2P chunk activations per rank.

    The order is that of "Pipeline Parallelism with Controllable Memory" and torch's
    ``ScheduleZBVZeroBubble``; it is free of bubbles after the fill when F, I and W take the
    same time.

    Raises:
        ValueError: the placement is not a fold with legs ``du``.
    """
    require_fold("zbv", placement)
    rows = tuple(
        number(((token,) for token in _tokens(rank, placement.num_ranks, num_microbatches)), num_microbatches)
        for rank in range(placement.num_ranks)
    )
    return Schedule("zbv", placement, num_microbatches, rows)


def _tokens(rank: int, num_ranks: int, num_microbatches: int) -> list[Token]:
    """One rank's row, written for at least 2P - 1 micro-batches: what fills the pipeline."""
    filled = max(num_microbatches, 2 * num_ranks - 1)
    down, up = rank, 2 * num_ranks - 1 - rank  # the rank's two stages
    upward = num_ranks - rank  # ranks from here to the bottom of the fold, this one included
    late = filled - (up - rank) - rank  # forwards of `down` that the warm-up leaves over
    backward_down = [(Op.I, down), (Op.W, down)]
    backward_up = [(Op.I, up), (Op.W, up)]

    # 1. Fill: enough forwards to keep busy until the first one is back from the bottom.
    row: list[Token] = [(Op.F, down)] * (2 * upward - 1)
    # 2. Forwards of both strands, until the first gradient is due.
    row += [(Op.F, up), (Op.F, down)] * rank
    # 3. The upward chunk turns forwards into gradients.
    row += [(Op.F, up), *backward_up] * upward
    # 4. Steady: one forward and one backward of each chunk, forwards of `down` while they last.
    row += [(Op.F, down), *backward_down, (Op.F, up), *backward_up] * late
    row += [*backward_down, (Op.F, up), *backward_up] * (filled - num_ranks - late)
    # 5. Drain: gradients first, then the weights fill what would be bubbles.
    row += [(Op.I, down), (Op.I, up)] * rank
    row += backward_down * upward
    row += [(Op.W, up)] * rank
    row += [(Op.W, down)] * rank
    return row
