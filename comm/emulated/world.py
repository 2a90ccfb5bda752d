"""The world of an emulated job: one object stands for all the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.emulated.channel import EmulatedReceiver, EmulatedSender
from weft.comm.emulated.clock import EmulatedClock
from weft.comm.emulated.conversation import EmulationError, Recorder, Said
from weft.comm.emulated.group import BACKEND, EmulatedGroup
from weft.comm.emulated.meeting import Call, NoStep, Step

VALUES = "values"
"""The kind of messages that all ranks receive from one rank, as a counterpart of a `Conversation`."""


class Asked(Enum):
    """Kinds of small values that ranks exchange."""

    value = "value"
    """Other values: every rank has the same as this one."""
    host = "host"
    """The host that a rank is on."""
    tied = "tied"
    """The parameters of a rank that others hold, too."""
    timeline = "timeline"
    """The timeline that a rank measured of a step."""


@dataclass(eq=False)
class EmulatedNetwork:
    """The part of the network between sites that an engine uses."""

    channels: dict[tuple[int, int], Any]
    priorities: dict[str, int] = field(default_factory=dict)
    profiles: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Empty: links are not probed, their figures are those of the configuration."""
    endpoint: None = None

    def close(self) -> None:
        """Nothing to close."""

    def abandon(self) -> None:
        """Nothing to abandon."""


class EmulatedWorld:
    """The interface of this rank to the emulated ranks of its job.

    Attributes:
        rank, size: this rank's number, and the number of ranks of the job.
        step: the other ranks' behaviour; `NoStep` outside of steps, when nothing takes time.
        collective_s: returns the duration of a collective once all members have joined.
        answers: by kind of value, a function of another rank and this rank's value that returns the other's.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        hosts: Callable[[int], int],
        sites: Callable[[int], int] = lambda rank: 0,
        recorder: Recorder | None = None,
    ) -> None:
        """Emulate all ranks but ``rank``.

        Args:
            hosts: number of the host of each rank.
            sites: number of the site of each rank.
            recorder: records this rank's operations.
        """
        if not 0 <= rank < size:
            raise EmulationError(f"--real {rank}: there is no such rank; the job has ranks 0 to {size - 1}")
        self.rank, self.size, self.clock = rank, size, EmulatedClock()
        self.device = torch.device("cpu")
        self.recorder = recorder or Recorder(rank)
        self.step: Step = NoStep()
        self.collective_s: Callable[[Call], float] | None = None
        self.answers: dict[Asked, Callable[[int, Any], Any]] = {Asked.host: lambda rank, _: hosts(rank)}
        self._hosts, self._sites = hosts, sites
        self._made: dict[tuple[int, ...], int] = {}
        self._spreads: dict[tuple[int, ...], tuple[int, bool]] = {}

    def join(self) -> None:
        """Make this process rank `rank` of torch.distributed: no rendezvous, no store but this process's."""
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

    def group_sizes(self) -> tuple[int, ...]:
        """Members of each process group that this rank is in, in the order of their making."""
        return tuple(len(members) for members, last in self._made.items() for _ in range(last + 1))

    # -- small values ----------------------------------------------------------------------------

    def gather(self, value: Any, ranks: Sequence[int], asked: Asked) -> list[Any]:
        """Return the value of each of ``ranks``; this rank's is ``value``."""
        said = Said(f"the {asked.value} that ranks tell each other")
        self.recorder.say(ranks, f"{asked.value} of {len(ranks)} ranks", said)
        other = self.answers.get(asked)
        mine = self.rank
        answers = [value if rank == mine or other is None else other(rank, value) for rank in ranks]
        if other is not None and asked is Asked.host:
            answers[list(ranks).index(mine)] = other(mine, value)
        return answers

    def hear(self, src: int, make: Callable[[], Any], kinds: Sequence[type] = ()) -> Any:
        """Return the value of ``kinds`` that rank ``src`` broadcasts: the one that this rank would ``make``."""
        name = kinds[0].__name__ if kinds else "value"
        self.recorder.say([src], VALUES, Said(f"the {name} that rank {src} tells all ranks"))
        return self.recorder.answer(VALUES, make)

    # -- tensors ---------------------------------------------------------------------------------

    def channels(self, hops: Collection[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """Return this rank's ends of its hops."""
        mine = [hop for hop in hops if self.rank in hop]
        return {
            (here, there): EmulatedSender(self, there) if here == self.rank else EmulatedReceiver(self, here)
            for here, there in mine
        }

    def network(self, hops: Collection[tuple[int, int]]) -> Any:
        """Return the stand-in for `weft.comm.wan.network.WanNetwork`: channels between sites, without sockets."""
        return EmulatedNetwork(self.channels(hops))

    def ends_s(self, operation: str, ranks: tuple[int, ...], num_bytes: int, root: int | None, start_s: float) -> float:
        """Return when an operation ends that this rank could begin at ``start_s``; outside of steps at once."""
        if isinstance(self.step, NoStep) or self.collective_s is None:
            return start_s
        ready_s = max(start_s, self.step.ready_s(operation, ranks, root))
        call = Call(operation, ranks, *self._spread(ranks), num_bytes)
        return ready_s + self.collective_s(call)

    def _spread(self, ranks: tuple[int, ...]) -> tuple[int, bool]:
        """Hosts that ranks are on, and whether they are at several sites."""
        if ranks not in self._spreads:
            hosts, sites = {self._hosts(rank) for rank in ranks}, {self._sites(rank) for rank in ranks}
            self._spreads[ranks] = len(hosts), len(sites) > 1
        return self._spreads[ranks]


def emulated_world() -> EmulatedWorld | None:
    """Return the emulated world of this process, or None in a real job."""
    if not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()  # torch 2.11 to 2.13
    return group.world if isinstance(group, EmulatedGroup) else None


def _create(options: Any, world: EmulatedWorld) -> EmulatedGroup:
    """Create the first group, for `torch.distributed.Backend.register_backend`. See `EmulatedGroup.new_group`."""
    return world.group(range(world.size))
