"""Collectives for buckets: reduce gradients and gather weights over the ranks that hold the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import Completed, Handle
from weft.comm.collectives import Collective, CollectiveCosts, Group, Primitive, Rewrite, plain
from weft.comm.collectives.cache import CostCache, topology_key
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.probe import known_costs, nodes_of_world
from weft.comm.collectives.space import Planner
from weft.conf.schema import Partition, ZeroConfig
from weft.engine.layout import RankLayout
from weft.engine.observability.watcher import Waits
from weft.engine.parallel.cut import Cut
from weft.engine.precision import DTYPES

Choose = Callable[[Collective], Rewrite]
"""Choice of a collective's implementation."""


@dataclass(frozen=True)
class NotedHandle:
    """Handle whose wait is published to the supervisor."""

    handle: Handle
    waits: Waits
    what: str

    def wait(self) -> Tensor:
        """Return the collective's output."""
        self.waits.begin_wait(self.what)
        tensor = self.handle.wait()
        self.waits.end_wait()
        return tensor


@dataclass(kw_only=True, eq=False)
class Collectives:
    """Starts collectives. Gradients and weights have separate communicators, so that neither waits for the other.

    Attributes:
        replica, num_replicas: this rank's index among the ranks that hold the same weights, and their number.
        gradients, weights: communicators, or None for a single replica. See `open`.
        choose: chooses the implementation of a collective.
        costs: measured costs of collectives over this rank's replicas, or None.
        gradient_format: dtype in which gradients are sent.
        overlap: whether to overlap with compute. Otherwise each collective blocks.
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
    """Observer of waits. Replicas wait equally often in a slot."""
    joint: Collectives | None = None
    """Group for parameters that every rank of a tensor-parallel stage holds in full. Each rank computes a part of their
    gradient. None means the same group as other parameters."""
    expert: Collectives | None = None
    """Group of ranks with the same experts. None means the same group as other parameters."""

    @classmethod
    def open(
        cls, layout: RankLayout, device: torch.device, zero: ZeroConfig, *, cache_dir: str, timeout_s: float
    ) -> Collectives:
        """Open the collectives over this rank's data-parallel group, with ``joint`` and ``expert``. Collective call.

        Args:
            cache_dir: folder with the costs of collectives, which are measured and stored there if they are missing.
        """
        stages, costs = range(layout.stages), CostCache.in_folder(cache_dir)
        open_over = partial(cls._open_over, layout, device, zero, costs, timeout_s)
        opened = open_over([group for stage in stages for group in layout.data_groups(stage)])
        if layout.tensor > 1:
            opened.joint = open_over([layout.lines_of(stage) for stage in stages], " of all")
        if layout.expert > 1:
            groups = [group for stage in stages for group in layout.expert_data_groups(stage)]
            opened.expert = open_over(groups, " of experts")
        return opened

    @classmethod
    def _open_over(
        cls,
        layout: RankLayout,
        device: torch.device,
        zero: ZeroConfig,
        cache: CostCache,
        timeout_s: float,
        members: Sequence[tuple[int, ...]],
        of: str = "",
    ) -> Collectives:
        """Open the collectives over the group in ``members`` that contains this rank. All groups have the same size."""
        if len(members[0]) == 1:
            return cls()
        nodes = nodes_of_world()
        groups = [Group(ranks, layout.nodes_of(ranks, nodes), layout.routes > 1) for ranks in members]
        connect = partial(Communicator.open, groups, device=device, timeout_s=timeout_s)
        gradients, weights = connect(name=f"gradients{of}"), connect(name=f"weights{of}")
        assert gradients is not None, "every rank is in one of the groups"
        cached = cache.read(topology_key(gradients.group, device.type)) is not None
        on = zero.partition is not Partition.none
        costs = known_costs(gradients, device=device, cache=cache) if on else None
        return cls(
            replica=gradients.group.ranks.index(dist.get_rank()),
            num_replicas=gradients.group.size,
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
        """The ranks that hold the same weights as this one."""
        return Group((dist.get_rank(),), (0,)) if self.gradients is None else self.gradients.group

    def reduce(self, whole: Tensor, target: Tensor | None = None) -> Handle:
        """Start to sum ``whole`` over replicas, in the format in which gradients are sent.

        The handle's `wait` returns the sum. If it is sent in the format of ``whole``, it is in ``target``. Otherwise it
        is a new tensor, in fp32 if this rank itself adds the parts of all ranks, which adds no rounding to the sum.
        Neither tensor may be used before.

        Args:
            target: this rank's shard, or ``whole`` itself. None: a new shard.
        """
        low = whole if self.gradients is None else whole.to(self.gradient_format)
        if target is not None and target.numel() == whole.numel():
            return self._start(self.gradients, Primitive.all_reduce, low, target if low is whole else low)
        if self.num_replicas == 1:
            return Completed(whole)
        if target is None or low is not whole:
            target = low.new_empty(low.numel() // self.num_replicas, dtype=self._summed_dtype(low))
        return self._start(self.gradients, Primitive.reduce_scatter, low, target)

    def _summed_dtype(self, low: Tensor) -> torch.dtype:
        """Return the format of a shard of the sum over replicas of ``low``."""
        if self.gradients is None or low.itemsize > 2:
            return low.dtype
        sums_last = self._rewrite(self.gradients, Primitive.reduce_scatter, low, low).sums_last
        return torch.float32 if sums_last else low.dtype

    def sum(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over replicas in place. Blocks."""
        self._start(self.gradients, Primitive.all_reduce, tensor, tensor).wait()

    def gather(self, shard: Tensor, whole: Tensor) -> Handle:
        """Start to all-gather the shards of all replicas into ``whole``."""
        return self._start(self.weights, Primitive.all_gather, shard, whole)

    def _start(self, over: Communicator | None, primitive: Primitive, source: Tensor, target: Tensor) -> Handle:
        if over is None:
            return Completed(target)
        handle: Handle = over.start(self._rewrite(over, primitive, source, target), source, target)
        if self.waits is not None:
            handle = NotedHandle(handle, self.waits, "gradients" if over is self.gradients else "weights")
        if not self.overlap:
            handle.wait()
        return handle

    def _rewrite(self, over: Communicator, primitive: Primitive, source: Tensor, target: Tensor) -> Rewrite:
        size = max(source.numel(), target.numel())
        return self.choose(Collective.flat(primitive, over.group, num_elements=size, itemsize=source.itemsize))

    def of(self, cut: Cut | None) -> Collectives:
        """Return the collectives for a parameter of which this rank holds the part ``cut``. None means all of it."""
        if cut is None:
            return self.joint or self
        return (self.expert or self) if cut.axis == "expert" else self

    @property
    def kinds(self) -> list[Collectives]:
        """These collectives, and those in ``joint`` and ``expert``."""
        return [self, *(other for other in (self.joint, self.expert) if other is not None)]

    def observe_waits(self, waits: Waits | None) -> None:
        """Set the observer of waits."""
        for kind in self.kinds:
            kind.waits = waits

    @property
    def communicators(self) -> list[Communicator]:
        """All communicators."""
        return [each for kind in self.kinds for each in (kind.gradients, kind.weights) if each is not None]

    def close(self) -> None:
        """Stop the communicators' threads."""
        for communicator in self.communicators:
            communicator.close()
