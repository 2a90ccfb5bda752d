"""A rank of the training recipe that reports durations: each layer takes equally long, until a host becomes slow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from weft.engine.supervision.driver.files import JOURNAL, read_journal

SLOW_AFTER, FACTOR = 4, 3.0
LAYER_S = 0.01
PAUSE_S = 0.5


def run(arguments: Sequence[str]) -> int:
    """As `weft.recipes.train.run`. Layers of rank 1 take `FACTOR` times as long, until its host is evicted."""
    from weft.engine.engine import WeftEngine
    from weft.engine.planning.adaptation import Adaptation
    from weft.recipes.train import run as train

    train_batch = WeftEngine.train_batch

    def seconds(adaptation: Adaptation) -> list[float]:
        engine, split = adaptation._engine, adaptation._engine.plan.split
        is_slow = engine.global_rank == 1 and engine.global_steps > SLOW_AFTER and not _has_evicted()
        layer_s = LAYER_S * (FACTOR if is_slow else 1.0)
        return [
            layer_s * count if stage in engine.module.stages else 0.0
            for stage, count in enumerate(split.counts)
            for _ in range(3)
        ]

    def paced(engine: WeftEngine, *args: object) -> object:
        adaptation = engine.adaptation
        while adaptation._replanning is not None and not adaptation._replanning.has_ended:
            time.sleep(0.01)
        if adaptation.proposals:
            time.sleep(PAUSE_S)  # until the driver has read the plan
        return train_batch(engine, *args)

    Adaptation._stage_seconds = seconds  # type: ignore[method-assign]
    WeftEngine.train_batch = paced  # type: ignore[method-assign]
    return train(arguments)


def _has_evicted() -> bool:
    return any(event["event"] == "evict" for event in read_journal(Path(os.environ["RUN"]) / JOURNAL))
