"""A rank of the training recipe that does something to itself in a given step of a given attempt."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """As `weft.recipes.train.run`; FAULTS holds ``attempt:rank:step:SIGNAL`` by spaces."""
    from weft.engine.engine import WeftEngine
    from weft.recipes.train import run as train

    train_batch = WeftEngine.train_batch

    def faulty(engine: WeftEngine, *args: object) -> object:
        for fault in os.environ["FAULTS"].split():
            attempt, rank, step, number = fault.split(":")
            here = (os.environ["WEFT_ATTEMPT"], os.environ["RANK"], str(engine.global_steps + 1))
            if here == (attempt, rank, step):
                os.kill(os.getpid(), signal.Signals[number])
        return train_batch(engine, *args)

    WeftEngine.train_batch = faulty
    return train(arguments)
