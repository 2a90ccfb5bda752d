"""Ranks that train, tell their places, and one of which stops at a slot."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from tests.engine.tiny import batches
from weft.conf.schema import WeftConfig
from weft.engine.initialize import initialize
from weft.engine.observability.watcher import Phase
from weft.engine.planning.plan_file import plan_to_json
from weft.engine.supervision.rank.agent_link import Heartbeat


def stop() -> None:
    """As SIGSTOP from outside does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_lock() -> None:
    """Keep the interpreter's lock."""
    ctypes.PyDLL(None).sleep(3600)


def hang() -> None:
    """Do nothing more, while threads go on."""
    time.sleep(3600)


FAULTS = {fault.__name__: fault for fault in (stop, hold_lock, hang)}


class FaultAt:
    """An observer that has a fault happen where a slot of a step begins, or behind its work."""

    def __init__(self, fault: str, step: int, slot: int, *, at_end: bool) -> None:
        self._fault, self._step, self._slot, self._at_end = FAULTS[fault], step, slot, at_end
        self._steps = self._slots = 0

    def step_begins(self, num_microbatches: int) -> None:
        self._steps, self._slots = self._steps + 1, 0

    def slot_begins(self, slot) -> None:
        if not self._at_end:
            self._strike()

    def slot_ends(self, slot) -> None:
        if self._at_end:
            self._strike()
        self._slots += 1

    def _strike(self) -> None:
        if (self._steps, self._slots) == (self._step, self._slot):
            self._fault()


def data(replica, num_replicas, microbatches, fault, step):
    """Batches whose reader has a fault before the first of a step."""
    for number, batch in enumerate(batches(replica, num_replicas)):
        if fault and number == (step - 1) * microbatches:
            FAULTS[fault]()
        yield batch


def train_until_stopped(config: WeftConfig, page: Path, plan: Path, rank: int, fault: str, where: tuple) -> None:
    """Train on; rank ``rank`` has ``fault`` at ``where``: step, and slot with whether behind it, or data."""
    engine, *_ = initialize(config=config)
    if dist.get_rank() == 0:
        plan.write_text(plan_to_json(engine.plan))
    mine = dist.get_rank() == rank
    step, slot, at_end = where
    in_data = fault if mine and slot is None else ""
    reader = data(engine.replica, engine.num_replicas, config.pipeline.microbatches, in_data, step)
    engine.set_dataiterator(reader)
    dist.barrier()
    place = Heartbeat(page, local_rank=dist.get_rank(), rank=dist.get_rank(), attempt=0)
    engine.attach_watcher(place)
    if mine and slot is not None:
        row = engine.schedule.rows[engine.pipe_rank]
        engine.slot_observers.append(FaultAt(fault, step, slot % len(row), at_end=at_end))
    place.enter(Phase.steady)
    while True:
        loss = engine.train_batch()
        engine.usage()
        float(loss)
