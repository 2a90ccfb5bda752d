"""The world of an emulated job: one object stands for all the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.emulated.channel import EmulatedReceiver, EmulatedSender
from weft.comm.emulated.clock import EmulatedClock
from weft.comm.emulated.group import BACKEND, EmulatedGroup
from weft.comm.emulated.operation_log import EmulationError, Operation, Recorder
from weft.comm.emulated.step import Call, NoStep, Step
from weft.comm.job import GatherPurpose, Job
from weft.comm.links import Hop

VALUES = "values"
"""The kind of messages that all ranks receive from one rank, as a counterpart of a `OperationLog`."""


@dataclass(eq=False)
class EmulatedNetwork:
    """The links between sites of an emulated job, as far as an engine uses them."""

    channels: dict[tuple[int, int], Any]
    priorities: dict[str, int] = field(default_factory=dict)
    profiles: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Empty: links are not probed, their figures are those of the configuration."""
    endpoint: None = None

    def close(self) -> None:
        """Nothing to close."""

    def abandon(self) -> None:
        """Nothing to abandon."""


class EmulatedWorld(Job):
    """The interface of this rank to the emulated ranks of its job.

    Attributes:
        rank, size: this rank's number, and the number of ranks of the job.
        step: the other ranks' behaviour; `NoStep` outside of steps, when nothing takes time.
        collective_s: returns the duration of a collective once all members have joined.
        answers: by kind of value, a function of another rank and this rank's value that returns the other rank's value.
    """

    is_real = False

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        hosts: Callable[[int], int],
        sites: Callable[[int], int] = lambda rank: 0,
        recorder: Recorder | None = None,
    ) -> None:
        """Emulate all ranks but ``rank``."""
        if not 0 <= rank < size:
            raise EmulationError(f"--real {rank}: there is no such rank; the job has ranks 0 to {size - 1}")
        self.rank, self.size, self.clock = rank, size, EmulatedClock()
        self.device = torch.device("cpu")
        self.recorder = recorder or Recorder(rank)
        self.step: Step = NoStep()
        self.collective_s: Callable[[Call], float] | None = None
        self.answers: dict[GatherPurpose, Callable[[int, Any], Any]] = {GatherPurpose.host: lambda rank, _: hosts(rank)}
        self._hosts, self._sites = hosts, sites
        self._made: dict[tuple[int, ...], int] = {}
        self._spreads: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}

    def join(self) -> None:
        """Make this process rank `rank` of torch.distributed, without a rendezvous and with a store of its own."""
        if BACKEND.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE=str(sum(self._hosts(rank) == self._hosts(self.rank) for rank in range(self.size))),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )
        dist.init_process_group(
            BACKEND,
            store=dist.HashStore(),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(days=1),
            pg_options=self,
        )

    def group(self, ranks: Sequence[int]) -> EmulatedGroup:
        """Create a process group; groups of the same ranks are numbered."""
        members = tuple(ranks)
        number = self._made[members] = self._made.get(members, -1) + 1
        span = f"{members[0]} to {members[-1]}" if len(members) > 4 else ", ".join(map(str, members))
        return EmulatedGroup(self, members, f"group {number} of {len(members)} ranks {span}")

    # -- small values ----------------------------------------------------------------------------

    def gather(self, exchange: Callable, value: Any, group: dist.ProcessGroup, purpose: GatherPurpose) -> list[Any]:
        """See `Job`."""
        ranks = dist.get_process_group_ranks(group)
        self.recorder.record(
            ranks, f"{purpose.value} of {len(ranks)} ranks", Operation(f"the {purpose.value} that ranks exchange")
        )
        other = self.answers.get(purpose)
        mine = self.rank
        answers = [value if rank == mine or other is None else other(rank, value) for rank in ranks]
        if other is not None and purpose is GatherPurpose.host:
            answers[ranks.index(mine)] = other(mine, value)
        return answers

    def broadcast(self, exchange: Callable, value: Any, src: int, kinds: Sequence[type]) -> Any:
        """See `Job`."""
        name = kinds[0].__name__ if kinds else "value"
        self.recorder.record([src], VALUES, Operation(f"the {name} that rank {src} broadcasts"))
        return self.recorder.answer(VALUES, value)

    def computes(self, src: int) -> bool:
        """See `Job`. False if the answer is recorded."""
        return not self.recorder.is_answered(VALUES)

    # -- tensors ---------------------------------------------------------------------------------

    def channels(self, connect: Callable, hops: Collection[Hop]) -> dict[Hop, Any]:
        """See `Job`."""
        mine = [hop for hop in hops if self.rank in hop]
        return {
            (here, there): EmulatedSender(self, there) if here == self.rank else EmulatedReceiver(self, here)
            for here, there in mine
        }

    def network(self, connect: Callable, hops: Collection[Hop]) -> EmulatedNetwork:
        """See `Job`."""
        return EmulatedNetwork(self.channels(connect, hops))

    def ends_s(self, operation: str, ranks: tuple[int, ...], num_bytes: int, root: int | None, start_s: float) -> float:
        """Return when an operation ends, if this rank could begin it at ``start_s``, at once outside of steps."""
        if isinstance(self.step, NoStep) or self.collective_s is None:
            return start_s
        ready_s = max(start_s, self.step.ready_s(operation, ranks, root))
        call = Call(operation, ranks, *self._spread(ranks), num_bytes)
        return ready_s + self.collective_s(call)

    def _spread(self, ranks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the number of hosts of ``ranks``, and their sites."""
        if ranks not in self._spreads:
            hosts, sites = {self._hosts(rank) for rank in ranks}, {self._sites(rank) for rank in ranks}
            self._spreads[ranks] = len(hosts), tuple(sorted(sites))
        return self._spreads[ranks]


def _create(options: Any, world: EmulatedWorld) -> EmulatedGroup:
    """Create the first group, for `torch.distributed.Backend.register_backend`. See `EmulatedGroup.new_group`."""
    return world.group(range(world.size))
