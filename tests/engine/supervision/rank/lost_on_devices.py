"""Ranks that die between two ranks that wait for each other, and attempts of processes that stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.device import rules
from tests.engine.checkpoint.engines import data
from weft.comm import rts_channel
from weft.comm.rts_channel import RtsSender
from weft.conf.host.processes import end_with_parent
from weft.conf.schema import WeftConfig
from weft.engine.attempt import Attempt
from weft.engine.initialize import build_engine
from weft.engine.planning.joining import join_job
from weft.engine.supervision.memory.checkpoints import attach_memory
from weft.engine.supervision.memory.slots import HostMemory
from weft.engine.supervision.messages import Assignment
from weft.engine.supervision.rank import attempts
from weft.engine.supervision.rank.attempts import run_attempts
from weft.engine.zero.sharding import Sharding

LIMIT_S = 120.0
"""After which a device that waits is stuck. On a busy host ranks leave an attempt at times that far apart."""
LEAVES_S = 200.0
"""In place of `THREADS_S`: no agent starts a rank again that has waited too long for a slow one to leave."""


def die() -> None:
    """As by SIGKILL from outside."""
    os.kill(os.getpid(), signal.SIGKILL)


def before_its_note(stack: Any) -> None:
    """Nothing is launched and nothing is said."""
    stack.enter_context(patch.object(RtsSender, "send", lambda *_: die()))


def between_note_and_send(stack: Any) -> None:
    """The note is out; of what it announces the device sends nothing."""

    def told(sender: RtsSender, tag: str, tensor: Any) -> None:
        rts = rts_channel._rts(sender._count, tag, tensor.nbytes)
        dist.send(rts, sender.peer, group=sender.rts_group)
        die()

    stack.enter_context(patch.object(RtsSender, "send", told))


def in_a_reduction(stack: Any) -> None:
    """All others of its stage wait in the sum of gradients."""
    stack.enter_context(patch.object(Sharding, "reduce", lambda *_: die()))


def behind_its_step(stack: Any) -> None:
    """Replicas wait for its new weights when their steps have ended: the host reads the loss, outside of a step."""

    def publish(sharding: Sharding) -> None:
        replicas = set(sharding.collectives.group.ranks) - {dist.get_rank()}
        dist.distributed_c10d._get_default_store().wait([f"step ended on {rank}" for rank in replicas])
        die()

    stack.enter_context(patch.object(Sharding, "publish", publish))


DEATHS: Mapping[str, Callable[[Any], None]] = {
    "before its note": before_its_note,
    "between its note and its send": between_note_and_send,
    "in a reduction": in_a_reduction,
    "behind its step": behind_its_step,
}


@dataclass
class Agent:
    """In place of `AgentLink`: ranks that stay take part in the next attempt at once."""

    last: int
    attempt: int = 0
    leaving: bool = False

    def begin(self, attempt: int, on_leave: Callable[[], None]) -> None:
        self.attempt = attempt

    def tell_leaving(self) -> None:
        pass

    def stand_by(self, reason: str) -> Assignment | None:
        return Assignment({"WEFT_ATTEMPT": str(self.attempt + 1)}, []) if self.attempt < self.last else None


def train_through(config: WeftConfig, root: str, dying: Sequence[tuple[str, int, int]], steps: int) -> dict[str, Any]:
    """Losses and errors of a job of as many attempts as ranks die, and one more.

    A rank that dies is a process of its own, whose parent then takes its place.

    Args:
        root: folder of the hosts' memories.
        dying: how, which rank, and in which step; one for each attempt but the last.
    """
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {"losses": {}, "errors": [], "recovered": [], "begun": 0}
    server = _store(serves=True) if rank == 0 else None  # in the process that stays
    for attempt, (_, dead, _) in enumerate(dying):
        if dead == rank:
            child = os.fork()
            if not child:
                end_with_parent()
                _attempts(config, root, dying, steps, found)
                os._exit(1)
            os.waitpid(child, 0)
            os.environ["WEFT_ATTEMPT"] = str(attempt + 1)
            found["begun"] = attempt + 1
    _attempts(config, root, dying, steps, found)
    del server  # here until all attempts are over
    return found


def _store(*, serves: bool = False) -> dist.Store:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=serves, timeout=rules.TIMEOUT, wait_for_workers=False)


def _attempts(
    config: WeftConfig, root: str, dying: Sequence[tuple[str, int, int]], steps: int, found: dict[str, Any]
) -> None:
    os.environ.setdefault("WEFT_ATTEMPT", "0")

    def once(_: Sequence[str], attempt: Attempt) -> int:
        number = int(os.environ["WEFT_ATTEMPT"])
        store = dist.PrefixStore(f"attempt {number}", _store())
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
        rules.limit(LIMIT_S)
        rules.keep_order(store)
        death = dying[number] if number < len(dying) else None
        try:
            _train(config, root, death, steps, attempt, found)
        except Exception as error:
            found["errors"].append(str(error))
            raise
        return 0

    agent = Agent(last=len(dying))
    with (
        patch.object(attempts.AgentLink, "from_environment", lambda _: agent),
        patch.object(attempts, "THREADS_S", LEAVES_S),
    ):
        code = run_attempts([], once)
    found["code"] = code


def _train(
    config: WeftConfig,
    root: str,
    death: tuple[str, int, int] | None,
    steps: int,
    attempt: Attempt,
    found: dict[str, Any],
) -> None:
    engine = build_engine(*join_job(config), attempt=attempt)
    attempt.callback(engine.abandon)
    attempt.interrupt = engine.interrupt
    rank, total = dist.get_rank(), config.pipeline.microbatches * engine.num_replicas
    memory = attach_memory(engine, HostMemory(Path(root, f"host{rank % 2}")))
    recovered = memory.recover()
    found["recovered"].append(recovered and recovered[0])
    engine.set_dataiterator(data(engine, engine.global_steps, total))
    for step in range(engine.global_steps + 1, steps + 1):
        if death is not None and death[1:] == (rank, step):
            DEATHS[death[0]](attempt)
        loss = engine.train_batch()
        if death is not None and death[2] == step:
            dist.distributed_c10d._get_default_store().set(f"step ended on {rank}", "")
        found["losses"][step] = float(loss)
        memory.take({})
        memory.finish()
    dist.barrier()
    engine.destroy()
