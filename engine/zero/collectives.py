"""The collectives of the chunks: sums of gradients and gathering of weights over the replicas of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import Handle
from weft.comm.collectives import Collective, Group, Primitive, Rewrite, plain
from weft.comm.collectives.cache import CostCache
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.planner import Planner
from weft.comm.collectives.probe import known_costs, nodes_of_world
from weft.conf.schema import Partition

Choose = Callable[[Collective], Rewrite]
"""How a collective is carried out."""


class Done:
    """The handle of a collective that a single replica needs not."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        """The tensor."""
        return self._tensor


class Converted:
    """The handle of a sum that travels in another number format than its target has."""

    def __init__(self, handle: Handle, target: Tensor) -> None:
        self._handle = handle
        self._target = target

    def wait(self) -> Tensor:
        """The target, filled."""
        return self._target.copy_(self._handle.wait())


class Collectives:
    """Gradients and weights have a communicator each, so that neither waits for the other."""

    def __init__(
        self,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        gradients: Communicator | None = None,
        weights: Communicator | None = None,
        choose: Choose = plain,
        gradient_format: torch.dtype = torch.float32,
        overlap: bool = True,
    ) -> None:
        """Made by `open`; without arguments, those of a single replica.

        Args:
            gradient_format: in which gradients travel.
            overlap: whether they run beside compute; otherwise each is waited for at once.
        """
        self.replica = replica
        self.num_replicas = num_replicas
        self._gradients = gradients
        self._weights = weights
        self._choose = choose
        self._gradient_format = gradient_format
        self._overlap = overlap

    @classmethod
    def open(
        cls,
        replicas: list[tuple[int, ...]],
        *,
        device: torch.device,
        timeout_s: float,
        cache: CostCache,
        partition: Partition,
        gradient_format: torch.dtype = torch.float32,
        overlap: bool = True,
    ) -> Collectives:
        """Those of this rank's replicas; a collective call over the world.

        Args:
            replicas: global ranks that hold the same stages, for each pipeline rank.
            cache: where costs of collectives are found, or left.
            partition: axes by which collectives may be rewritten.
            gradient_format, overlap: as of the class.
        """
        mine = next(ranks for ranks in replicas if dist.get_rank() in ranks)
        if len(mine) == 1:
            return cls()
        nodes = nodes_of_world()
        groups = [Group(ranks, tuple(nodes[rank] for rank in ranks)) for ranks in replicas]
        connect = partial(Communicator.open, groups, device=device, timeout_s=timeout_s)
        gradients, weights = connect(name="gradients"), connect(name="weights")
        assert gradients is not None, "every rank is among some replicas"
        on = partition is not Partition.none
        costs = known_costs(gradients, device=device, cache=cache) if on else None
        return cls(
            replica=mine.index(dist.get_rank()),
            num_replicas=len(mine),
            gradients=gradients,
            weights=weights,
            choose=Planner(costs, partition),
            gradient_format=gradient_format,
            overlap=overlap,
        )

    def reduce(self, whole: Tensor, target: Tensor) -> Handle:
        """Start to sum ``whole`` over replicas into ``target``: this rank's shard of it, or ``whole`` itself.

        Neither may be touched before the handle was waited for.
        """
        if self._gradients is None or whole.dtype == self._gradient_format:
            return self._reduce(whole, target)
        low = whole.to(self._gradient_format)
        shard = low if target.numel() == low.numel() else low.new_empty(target.numel())
        return Converted(self._reduce(low, shard), target)

    def _reduce(self, whole: Tensor, target: Tensor) -> Handle:
        if target.numel() == whole.numel():
            return self._start(self._gradients, Primitive.all_reduce, whole, whole)
        return self._start(self._gradients, Primitive.reduce_scatter, whole, target)

    def sum(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over replicas in place, and wait for it."""
        self._start(self._gradients, Primitive.all_reduce, tensor, tensor).wait()

    def gather(self, shard: Tensor, whole: Tensor) -> Handle:
        """Start to put the shards of all replicas together in ``whole``."""
        return self._start(self._weights, Primitive.all_gather, shard, whole)

    def _start(self, over: Communicator | None, primitive: Primitive, source: Tensor, target: Tensor) -> Handle:
        if over is None:
            return Done(target)
        size = max(source.numel(), target.numel())
        wish = Collective.flat(primitive, over.group, num_elements=size, itemsize=source.itemsize)
        handle = over.start(self._choose(wish), source, target)
        if not self._overlap:
            handle.wait()
        return handle

    def close(self) -> None:
        """End the threads that carry them."""
        for communicator in (self._gradients, self._weights):
            if communicator is not None:
                communicator.close()
