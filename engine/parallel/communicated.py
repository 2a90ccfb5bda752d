"""Axis groups whose members are ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import Handle
from weft.comm.collectives import Collective, Group, Primitive, plain
from weft.comm.collectives.communicator import PLAIN, Communicator
from weft.comm.collectives.primitives import all_to_all, maximum
from weft.comm.collectives.probe import nodes_of_world
from weft.engine.parallel.axis import AxisGroup, AxisGroups


@dataclass(frozen=True, eq=False)
class CommunicatedGroup:
    """Members that are ranks of their own; see `AxisGroup`. A lost one is a `ChannelError` that names the axis."""

    axis: str
    communicator: Communicator

    @property
    def size(self) -> int:
        """Number of members."""
        return self.communicator.group.size

    @property
    def index(self) -> int:
        """Of this rank among them."""
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
        return self.communicator.start_whole(maximum, tensor, "maximum")

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """See `AxisGroup`."""
        return self.communicator.start_whole(partial(all_to_all, send=send, receive=receive), tensor, "all_to_all")

    def _start(self, primitive: Primitive, source: Tensor, target: Tensor) -> Handle:
        size = max(source.numel(), target.numel())
        wish = Collective.flat(primitive, self.communicator.group, num_elements=size, itemsize=source.itemsize)
        return self.communicator.start(plain(wish), source, target)


def open_axes(groups: Mapping[str, Sequence[tuple[int, ...]]], device: torch.device, timeout_s: float) -> AxisGroups:
    """This rank's groups along the axes that share the work of a layer; a collective call over the world.

    Args:
        groups: ranks of every group, by axis; those of one rank need not be named.
    """
    if not groups:
        return AxisGroups()
    nodes = nodes_of_world()
    opened: dict[str, AxisGroup] = {}
    for axis, members in groups.items():
        flat = [Group(ranks, tuple(nodes[rank] for rank in ranks)) for ranks in members]
        communicator = Communicator.open(
            flat,
            device=device,
            timeout_s=timeout_s,
            name=f"{axis} axis",
            meshes={group: [group.flat] for group in flat},
            primitives=(*PLAIN, Primitive.reduces) if axis == "expert" else PLAIN,
        )
        assert communicator is not None, "every rank is in one of the groups"
        opened[axis] = CommunicatedGroup(axis, communicator)
    return AxisGroups(**opened)


def close_axes(axes: AxisGroups) -> None:
    """Stop the threads of the groups; their process groups end with the engine's."""
    for group in (axes.tensor, axes.context, axes.expert):
        if isinstance(group, CommunicatedGroup):
            group.communicator.close()
