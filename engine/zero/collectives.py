"""The collectives of buckets: reduce gradients and gather weights over the replicas of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import Handle
from weft.comm.collectives import Collective, CollectiveCosts, Group, Primitive, Rewrite, plain
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.planner import Planner
from weft.comm.collectives.probe import known_costs, nodes_of_world
from weft.conf.schema import Partition, WeftConfig
from weft.engine.planning.layout import RankLayout
from weft.engine.precision import DTYPES

Choose = Callable[[Collective], Rewrite]
"""How a collective is carried out."""


class Waits(Protocol):
    """Told when this rank waits for its replicas; see `weft.engine.supervision.places.PlaceWriter`."""

    def begin_wait(self) -> None:
        """From here on it waits."""
        ...

    def end_wait(self) -> None:
        """It goes on."""
        ...


@dataclass(frozen=True)
class CompletedHandle:
    """Handle of a collective that is already complete, as on a single replica."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """The tensor."""
        return self.tensor


@dataclass(frozen=True)
class CastHandle:
    """Handle of a reduction whose number format differs from that of its target."""

    handle: Handle
    target: Tensor

    def wait(self) -> Tensor:
        """The filled target."""
        return self.target.copy_(self.handle.wait())


@dataclass(frozen=True)
class NotedHandle:
    """Handle whose wait is told to whoever watches over the run."""

    handle: Handle
    waits: Waits

    def wait(self) -> Tensor:
        """What the collective has filled."""
        self.waits.begin_wait()
        tensor = self.handle.wait()
        self.waits.end_wait()
        return tensor


@dataclass(kw_only=True, eq=False)
class Collectives:
    """Starts collectives; gradients and weights have separate communicators, so that neither waits for the other.

    Attributes:
        gradients, weights: None on a single replica, as without arguments; see `open`.
        choose: how a collective is carried out.
        costs: measured costs over this rank's replicas, if any.
        source: origin of the costs.
        gradient_format: number format in which gradients are sent.
        overlap: whether to overlap with compute; otherwise each collective blocks.
    """

    replica: int = 0
    num_replicas: int = 1
    gradients: Communicator | None = None
    weights: Communicator | None = None
    choose: Choose = plain
    costs: CollectiveCosts | None = None
    source: str = ""
    gradient_format: torch.dtype = torch.float32
    overlap: bool = True
    waits: Waits | None = None
    """Told of waits; replicas wait equally often in a slot."""

    @classmethod
    def open(cls, config: WeftConfig, layout: RankLayout, device: torch.device) -> Collectives:
        """Open the collectives of this rank's replicas; a collective call over the world.

        Costs are read from ``data.cache_dir``, or measured and stored there.
        """
        if layout.replicas == 1:
            return cls()
        nodes, zero = nodes_of_world(), config.zero
        groups = [
            Group(ranks, tuple(nodes[rank] for rank in ranks))
            for ranks in (layout.replicas_of(stage) for stage in range(layout.stages))
        ]
        connect = partial(Communicator.open, groups, device=device, timeout_s=config.comm.timeout_s)
        gradients, weights = connect(name="gradients"), connect(name="weights")
        assert gradients is not None, "every rank is among some replicas"
        cache = CostCache.in_folder(config.data.cache_dir)
        cached = cache.read(topology_key(gradients.group, device.type)) is not None
        on = zero.partition is not Partition.none
        costs = known_costs(gradients, device=device, cache=cache) if on else None
        return cls(
            replica=layout.position(dist.get_rank()).replica,
            num_replicas=layout.replicas,
            gradients=gradients,
            weights=weights,
            choose=Planner(costs, zero.partition),
            costs=costs,
            source=f"cache {cache.path}" if cached else "measured by the probe of collectives",
            gradient_format=DTYPES[zero.communication_data_type],
            overlap=zero.overlap_comm,
        )

    @property
    def group(self) -> Group:
        """The group of this rank's replicas."""
        return Group((dist.get_rank(),), (0,)) if self.gradients is None else self.gradients.group

    def reduce(self, whole: Tensor, target: Tensor) -> Handle:
        """Start to sum ``whole`` over replicas into ``target``: this rank's shard of it, or ``whole`` itself.

        Use neither tensor before waiting for the handle.
        """
        if self.gradients is None or whole.dtype == self.gradient_format:
            return self._reduce(whole, target)
        low = whole.to(self.gradient_format)
        shard = low if target.numel() == low.numel() else low.new_empty(target.numel())
        return CastHandle(self._reduce(low, shard), target)

    def _reduce(self, whole: Tensor, target: Tensor) -> Handle:
        if target.numel() == whole.numel():
            return self._start(self.gradients, Primitive.all_reduce, whole, whole)
        return self._start(self.gradients, Primitive.reduce_scatter, whole, target)

    def sum(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over replicas in place; blocks."""
        self._start(self.gradients, Primitive.all_reduce, tensor, tensor).wait()

    def gather(self, shard: Tensor, whole: Tensor) -> Handle:
        """Start to all-gather the shards of all replicas into ``whole``."""
        return self._start(self.weights, Primitive.all_gather, shard, whole)

    def _start(self, over: Communicator | None, primitive: Primitive, source: Tensor, target: Tensor) -> Handle:
        if over is None:
            return CompletedHandle(target)
        size = max(source.numel(), target.numel())
        wish = Collective.flat(primitive, over.group, num_elements=size, itemsize=source.itemsize)
        handle: Handle = over.start(self.choose(wish), source, target)
        if self.waits is not None:
            handle = NotedHandle(handle, self.waits)
        if not self.overlap:
            handle.wait()
        return handle

    def close(self) -> None:
        """Stop the communicators' threads."""
        for communicator in (self.gradients, self.weights):
            if communicator is not None:
                communicator.close()
