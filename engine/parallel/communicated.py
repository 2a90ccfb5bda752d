"""Axis groups whose members are ranks of the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from weft.comm.channel import ChannelError, Handle
from weft.comm.collectives import Collective, Group, Primitive, plain
from weft.comm.collectives.communicator import PLAIN, Communicator
from weft.comm.collectives.primitives import all_to_all, maximum, shift
from weft.comm.collectives.probe import nodes_of_world
from weft.comm.exchange import gather
from weft.conf.host.processes import host_identity, own_start, process_state
from weft.engine.parallel.axis import AxisGroup, AxisGroups

GONE_S = 1.0
"""Longest time in seconds to wait after a failed operation until a lost member's process has ended."""


class Whereabouts(NamedTuple):
    """Identity of a member's process.

    Attributes:
        host: identity of the process's host and network namespace.
        pid: its process id on that host.
        started: its start time, in clock ticks since boot.
    """

    host: tuple[object, ...]
    pid: int
    started: int

    @classmethod
    def own(cls) -> Whereabouts:
        """Return the identity of this process."""
        return cls(host_identity(), os.getpid(), own_start())

    @property
    def is_gone(self) -> bool:
        """True if the process ran on this host and has ended. Always false for processes on other hosts."""
        if self.host != host_identity():
            return False
        state = process_state(self.pid)
        return state is None or state.state == "Z" or state.started != self.started


_ALSO = {"expert": (Primitive.all_to_all,), "context": (Primitive.shift,)}
"""Operations that groups of an axis need in addition to gathers and sums."""


@dataclass(frozen=True)
class MemberHandle:
    """An operation in flight. If it fails, the error names the members that are lost.

    Attributes:
        handle: handle of the collective.
        others: processes of the other members, by rank.
    """

    handle: Handle
    others: Mapping[int, Whereabouts]

    def wait(self) -> Tensor:
        """Wait for the operation, and return its result.

        Raises:
            ChannelError: a member has exited or did not take part in time.
        """
        try:
            return self.handle.wait()
        except ChannelError as error:
            lost = _lost(self.others)
            if not lost:
                raise
            named = f"rank {lost[0]} is" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} are"
            raise ChannelError(f"{error}; {named} lost") from error


def _lost(others: Mapping[int, Whereabouts]) -> list[int]:
    """Return the other ranks whose processes have ended on this host. A single other rank counts as lost.

    A rank that fails because another rank is lost records this in the job's store. Its own exit then does not count.
    """
    if len(others) == 1:
        return list(others)
    _tell_of_failure()
    deadline = monotonic() + GONE_S
    while not (lost := [rank for rank, process in others.items() if process.is_gone and not _has_told(rank)]):
        if monotonic() > deadline:
            break
        sleep(GONE_S / 50)
    if dist.get_rank() == 0:
        sleep(GONE_S)  # the store ends with this process, and others must still read it
    return lost


def _tell_of_failure() -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the store may have ended
        _get_default_store().set(f"weft/failed/{dist.get_rank()}", "")


def _forget_failure() -> None:
    """Remove this rank's record of an earlier attempt from the store, because restarts may reuse the store."""
    with contextlib.suppress(RuntimeError, ValueError):
        _get_default_store().delete_key(f"weft/failed/{dist.get_rank()}")


def _has_told(rank: int) -> bool:
    with contextlib.suppress(RuntimeError, ValueError):
        return bool(_get_default_store().check([f"weft/failed/{rank}"]))
    return False


@dataclass(frozen=True, eq=False)
class CommunicatedGroup:
    """An `AxisGroup` of the job's ranks.

    If a member is lost, operations raise a `ChannelError` that names the axis and the rank.
    """

    axis: str
    communicator: Communicator
    others: Mapping[int, Whereabouts]
    """Processes of the other members, by rank."""

    @property
    def size(self) -> int:
        """Number of members."""
        return self.communicator.group.size

    @property
    def index(self) -> int:
        """Index of this rank in the group."""
        return self.communicator.group.ranks.index(dist.get_rank())

    def all_gather(self, shard: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._start(Primitive.all_gather, shard, shard.new_empty((self.size * shard.shape[0], *shard.shape[1:])))

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        return self._start(Primitive.reduce_scatter, tensor, part)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._start(Primitive.all_reduce, tensor, tensor)

    def maximum(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._named(self.communicator.start_whole(maximum, tensor, "maximum"))

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """See `AxisGroup`."""
        work = partial(all_to_all, send=send, receive=receive)
        return self._named(self.communicator.start_whole(work, tensor, "all_to_all"))

    def shift(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._named(self.communicator.start_whole(shift, tensor, "shift"))

    def _start(self, primitive: Primitive, source: Tensor, target: Tensor) -> Handle:
        size = max(source.numel(), target.numel())
        wish = Collective.flat(primitive, self.communicator.group, num_elements=size, itemsize=source.itemsize)
        return self._named(self.communicator.start(plain(wish), source, target))

    def _named(self, handle: Handle) -> Handle:
        return MemberHandle(handle, self.others)


def open_axes(groups: Mapping[str, Sequence[tuple[int, ...]]], device: torch.device, timeout_s: float) -> AxisGroups:
    """Open this rank's groups along the axes that share the work of a layer. Collective call over the world.

    Args:
        groups: ranks of every group, by axis. If it is empty, no group is opened. An axis that it contains must have a
            group for every rank.
    """
    if not groups:
        return AxisGroups()
    _forget_failure()
    nodes, processes = nodes_of_world(), gather(Whereabouts.own(), kinds=(Whereabouts,))
    opened: dict[str, AxisGroup] = {}
    for axis, members in groups.items():
        flat = [Group(ranks, tuple(nodes[rank] for rank in ranks)) for ranks in members]
        communicator = Communicator.open(
            flat,
            device=device,
            timeout_s=timeout_s,
            name=f"{axis} axis",
            meshes={group: [group.flat] for group in flat},
            primitives=(*PLAIN, *_ALSO.get(axis, ())),
        )
        assert communicator is not None, "every rank is in one of the groups"
        others = {rank: processes[rank] for rank in communicator.group.ranks if rank != dist.get_rank()}
        opened[axis] = CommunicatedGroup(axis, communicator, others)
    return AxisGroups().with_groups(opened)


def close_axes(axes: AxisGroups) -> None:
    """Stop the groups' threads. The engine's end releases their process groups."""
    for communicator in communicators_of(axes):
        communicator.close()


def communicators_of(axes: AxisGroups) -> list[Communicator]:
    """Return the communicators of the groups that `open_axes` opened."""
    return [group.communicator for group in axes.by_axis.values() if isinstance(group, CommunicatedGroup)]
