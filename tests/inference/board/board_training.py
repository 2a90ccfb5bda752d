"""A rank's board of its training, as the rank itself sees it."""

from __future__ import annotations

from tests.engine.tiny import begun
from weft.conf.schema import WeftConfig
from weft.inference.board.observer import WORK
from weft.inference.board.reader import BoardReader
from weft.pipeline.action import Op


def train_and_read(config: WeftConfig, steps: int) -> dict:
    """Losses, work on the board, the rank's own marks of it in the same step, its pairs, and whether the board goes."""
    engine = begun(config)
    reader = BoardReader(engine.bubbles.path) if engine.bubbles else None
    losses = [float(engine.train_batch()) for _ in range(steps)]
    work = reader.work()[-1][1] if reader else []
    marks = [  # the last step's last work has no end yet
        (mark.start, mark.end) for mark in engine.records[-2].marks if mark.slot[0].op in WORK - {Op.STEP}
    ]
    pairs = sum(len(slot) == 2 for slot in engine.schedule.rows[engine.pipe_rank])
    predicted = reader.upcoming(60.0) if reader else []
    engine.destroy()
    return {
        "losses": losses,
        "work": work,
        "marks": marks,
        "pairs": pairs,
        "predicted": predicted,
        "gone": reader and not reader.path.exists(),
    }
