"""A rank of the training recipe that does something to itself or its hosts in a given step of a given attempt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft.engine.supervision.driver.files import DENIED_HOSTS as DENIED
from weft.engine.supervision.driver.files import JOURNAL, DenyList, read_journal


def run(arguments: Sequence[str]) -> int:
    """As `weft.recipes.train.run`; FAULTS holds ``attempt:rank:step:DEED`` by spaces, a deed being one of `DEEDS`."""
    from weft.engine.engine import WeftEngine
    from weft.recipes.train import run as train

    train_batch = WeftEngine.train_batch

    def faulty(engine: WeftEngine, *args: object) -> object:
        for fault in os.environ["FAULTS"].split():
            attempt, rank, step, deed = fault.split(":")
            here = (os.environ["WEFT_ATTEMPT"], os.environ["RANK"], str(engine.global_steps + 1))
            if here == (attempt, rank, step):
                DEEDS[deed]()
        return train_batch(engine, *args)

    WeftEngine.train_batch = faulty
    return train(arguments)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _die_in_a_pair() -> None:
    """In the next strand pair, in the backward's thread, with a collective of each strand in flight."""
    from weft.engine.strands.pair_scheduler import PairScheduler
    from weft.pipeline.strands.plan import Step

    pause = PairScheduler.pause

    def fatal(scheduler: PairScheduler, strand: Step) -> None:
        if strand is Step.backward and scheduler.handovers >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        pause(scheduler, strand)

    PairScheduler.pause = fatal  # type: ignore[method-assign]


def _evict_and_die() -> None:
    _deny_list().evict("right", "by a test")
    os.kill(os.getpid(), signal.SIGKILL)


def _readmit_and_wait() -> None:
    """Until the driver has noticed."""
    _deny_list().readmit("right")
    while not any(event["event"] == "readmit" for event in read_journal(Path(os.environ["RUN"]) / JOURNAL)):
        time.sleep(0.02)


def _wait() -> None:
    while True:
        time.sleep(1)


def _deny_list() -> DenyList:
    return DenyList(Path(os.environ["RUN"]).parent / DENIED)


DEEDS: Mapping[str, Callable[[], None]] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "pair": _die_in_a_pair,
    "evict": _evict_and_die,
    "readmit": _readmit_and_wait,
    "wait": _wait,
}
