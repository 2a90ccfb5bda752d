"""A rank of the training recipe in a run whose rank 1 becomes slow, until its host is evicted."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from weft.engine.supervision.driver.files import JOURNAL, read_journal

PAUSE_S = 0.5


def run(arguments: Sequence[str]) -> int:
    """Run `weft.recipes.train.run`. Steps wait while a plan is made, and are slow once the driver may read it."""
    from tests.engine.planning.adapted import slow_down
    from weft.engine.engine import WeftEngine
    from weft.recipes.train import run as train

    slow_down(1, is_slow=lambda: not _has_evicted())
    train_batch = WeftEngine.train_batch

    def paced(engine: WeftEngine, *args: object) -> object:
        if engine.adaptation.proposals:
            time.sleep(PAUSE_S)
        return train_batch(engine, *args)

    WeftEngine.train_batch = paced  # type: ignore[method-assign]
    return train(arguments)


def _has_evicted() -> bool:
    return any(event["event"] == "evict" for event in read_journal(Path(os.environ["RUN"]) / JOURNAL))
