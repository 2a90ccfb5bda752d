"""Ranks that take memory checkpoints on emulated hosts, die, and recover."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.engine.checkpoint.engines import build, data
from weft.conf.schema import WeftConfig
from weft.engine.supervision.memory.checkpoints import attach_memory
from weft.engine.supervision.memory.slots import HostMemory
from weft.pipeline.action import Slot


class Killer:
    """Ends the process in the second slot of a step."""

    def step_begins(self, num_microbatches: int) -> None:
        self.slots = 0

    def slot_begins(self, slot: Slot) -> None:
        self.slots += 1
        if self.slots == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def slot_ends(self, slot: Slot) -> None:
        """Nothing happens."""


def train(
    config: WeftConfig, root: str, hosts: list[int], steps: int, total: int, killed: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Recover if there is anything to recover from, and train up to ``steps``, with a memory checkpoint after each.

    Args:
        root: folder of the hosts' memories.
        hosts: the host of each rank.
        total: micro-batches of a step over all replicas.
        killed: rank, and the step in the middle of which it is.
    """
    engine = build(config)
    rank = dist.get_rank()
    memory = attach_memory(engine, HostMemory(Path(root, f"host{hosts[rank]}")))
    found = memory.recover()
    begun = engine.global_steps
    engine.set_dataiterator(data(engine, begun, total))
    losses = {}
    for step in range(begun + 1, steps + 1):
        if killed == (rank, step):
            engine.slot_observers.append(Killer())
        losses[step] = float(engine.train_batch())
        if step == 2:
            memory.forget()  # as where bad numbers send a run back
        memory.take({"step": step})
    memory.finish()
    dist.barrier()
    engine.destroy()
    return {"losses": losses, "found": found, "whole": memory.num_whole}
