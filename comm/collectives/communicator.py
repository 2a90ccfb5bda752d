"""The communicator: executes rewrites on torch.distributed, asynchronously to compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError
from weft.comm.collectives.collective import GATHERING, REDUCING, Collective, Primitive
from weft.comm.collectives.executors import InOrderExecutor, Pending, completed, executor_for
from weft.comm.collectives.group import Group, Mesh
from weft.comm.collectives.primitives import PRIMITIVES, Times, connect_groups, reduces
from weft.comm.collectives.rewrite import Rewrite, Step

PLAIN = (Primitive.all_reduce, Primitive.reduce_scatter, Primitive.all_gather)
"""Primitives that axes are connected for eagerly; the others connect at first use, which is collective."""


@dataclass(frozen=True)
class _Axis:
    """An axis of a mesh: this rank's process group and executor."""

    group: dist.ProcessGroup
    executor: InOrderExecutor


@dataclass(frozen=True, eq=False)
class Handle:
    """A collective in flight. See `weft.comm.channel.Handle`.

    Attributes:
        what: names the collective in error messages.
        target: the tensor that the chunks write; None returns the result of the only chunk.
    """

    what: str
    target: Tensor | None
    chunks: list[Pending]

    def wait(self) -> Tensor:
        """Block until the target is complete, and return it; on a GPU only the current stream waits.

        Raises:
            ChannelError: a rank did not participate in time, or has exited.
        """
        try:
            results = [chunk.result() for chunk in self.chunks]
        except RuntimeError as error:
            raise ChannelError(f"{self.what} failed: {error}") from error
        return results[0] if self.target is None else self.target


class Communicator:
    """Process groups and executors of one group, for each axis of its meshes.

    Operations on one axis run in the order in which they were started; different axes run
    concurrently. Open several communicators for streams of work that must not wait for each
    other, such as gradients and weights.
    """

    def __init__(self, group: Group, axes: Mapping[tuple[tuple[int, ...], int], _Axis], name: str) -> None:
        """Store the opened axes. Call `open` instead."""
        self.group = group
        self._axes = axes
        self._name = name
        self.times = Times()

    @classmethod
    def open(
        cls,
        groups: Iterable[Group],
        *,
        device: torch.device,
        timeout_s: float,
        name: str = "collectives",
        meshes: Mapping[Group, Iterable[Mesh]] | None = None,
        primitives: Collection[Primitive] = PLAIN,
    ) -> Communicator | None:
        """Create the communicator for the group that this rank is in. A collective call over the world.

        Args:
            groups: disjoint groups, the same on every rank.
            timeout_s: seconds after which an unfinished collective fails.
            name: describes the tensors in error messages.
            meshes: partitions to open for each group; `Group.meshes` if None.
            primitives: primitives for which axes are connected before their first use.

        Returns:
            None on a rank that is in none of the groups.
        """
        mine = None
        for group in groups:
            axes = {}
            for mesh in group.meshes() if meshes is None else meshes[group]:
                for axis in range(len(mesh.shape)):
                    if opened := _open_axis(mesh, axis, device, timeout_s, name):
                        axes[mesh.shape, axis] = opened
            if dist.get_rank() in group.ranks:
                mine = cls(group, axes, name)
        if mine is not None:
            connect_groups(((axis.group, primitives) for axis in mine._axes.values()), device)
        return mine

    def start(self, rewrite: Rewrite, source: Tensor, target: Tensor) -> Handle:
        """Start ``rewrite``; all ranks of the group start the same rewrites in the same order.

        Neither tensor may be accessed before the handle's `wait` returns.

        Args:
            source: contiguous; the full tensor for a reduce-scatter, this rank's shard for an
                all-gather, the same tensor as ``target`` for an all-reduce.
            target: contiguous; this rank's shard for a reduce-scatter, otherwise the full tensor. Of the dtype of
                ``source``, or fp32 for a rewrite that `sums_last`.

        Raises:
            ValueError: the tensors do not fit the collective, or its mesh was not opened.
        """
        self._check(rewrite, source, target)
        primitive, size = rewrite.collective.primitive, self.group.size
        length = target.numel() if primitive is not Primitive.all_gather else source.numel()
        bounds = rewrite.bounds(length)
        pending = [completed(source) for _ in bounds]
        flows = [_Flow(rewrite, target, begin, end, size, self.times) for begin, end in bounds]
        # Submit step by step, not chunk by chunk: where steps share an axis, the first step of a
        # later chunk must not queue behind the last step of an earlier one.
        for number, step in enumerate(rewrite.steps):
            axis = self._axes[rewrite.mesh.shape, step.axis]
            for chunk, flow in enumerate(flows):
                pending[chunk] = axis.executor.submit(partial(flow.run, number, axis.group), pending[chunk])
        return Handle(f"{self._what}: {rewrite.collective}: {rewrite}", target, pending)

    def start_whole(self, work: Callable[[Tensor, dist.ProcessGroup], Tensor], tensor: Tensor, what: str) -> Handle:
        """Start an operation of the whole group that is not a rewrite, in launch order with the rewrites.

        Args:
            work: one of `weft.comm.collectives.primitives`. The handle's `wait` returns its result.
            tensor: not to be accessed before the handle's `wait` returns.
            what: name of the operation, for error messages.
        """
        axis = self._axes[self.group.flat.shape, 0]
        pending = axis.executor.submit(lambda ready: work(ready, axis.group), completed(tensor))
        return Handle(f"{self._what}: {what}", None, [pending])

    @property
    def _what(self) -> str:
        return f"{self._name} of ranks {', '.join(map(str, self.group.ranks))}, on rank {dist.get_rank()}"

    def axes(self) -> list[tuple[Mesh, int]]:
        """Return the open axes, with their meshes."""
        return [(Mesh(self.group, shape), axis) for shape, axis in self._axes]

    def process_group(self, mesh: Mesh, axis: int) -> dist.ProcessGroup:
        """Return this rank's process group along an open axis."""
        return self._axes[mesh.shape, axis].group

    def close(self) -> None:
        """Stop the threads; the process groups live until the job ends."""
        for axis in self._axes.values():
            axis.executor.close()

    def _check(self, rewrite: Rewrite, source: Tensor, target: Tensor) -> None:
        collective: Collective = rewrite.collective
        if collective.group != self.group or (rewrite.mesh.shape, 0) not in self._axes:
            raise ValueError(f"{rewrite}: mesh {rewrite.mesh.shape} of that group was not opened; pass it to `open`")
        shard_of = {Primitive.reduce_scatter: target, Primitive.all_gather: source}.get(collective.primitive)
        whole = source if collective.primitive is Primitive.reduce_scatter else target
        fits = whole.numel() * source.itemsize == collective.num_bytes
        fits = fits and (source.dtype == target.dtype or (rewrite.sums_last and target.dtype is torch.float32))
        if shard_of is not None:
            fits = fits and shard_of.numel() * self.group.size == whole.numel()
        elif source.data_ptr() != target.data_ptr():
            raise ValueError(f"{collective}: an all-reduce is in place; give one tensor as source and target")
        if not (fits and source.is_contiguous() and target.is_contiguous()):
            raise ValueError(
                f"{collective}: source {tuple(source.shape)} and target {tuple(target.shape)} of {source.dtype} "
                f"do not fit; both must be contiguous, and a shard 1/{self.group.size} of the whole"
            )


@dataclass
class _Flow:
    """A chunk on its way through the steps of a rewrite.

    Between steps the chunk is a tensor [unsharded axes..., elements]: a reducing step removes its
    axis, a gathering step prepends it.
    """

    rewrite: Rewrite
    target: Tensor
    begin: int
    end: int
    size: int
    times: Times

    def __post_init__(self) -> None:
        self._steps, self._shape = self.rewrite.steps, self.rewrite.mesh.shape
        self._primitive = self.rewrite.collective.primitive
        self._sharding = any(step.primitive in GATHERING | REDUCING for step in self._steps)
        self._axes: list[int] = []

    def run(self, number: int, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        """Run step ``number`` on the previous step's result; the first slices the chunk, the last writes it back.

        The last step returns the target, so that the step's own result is freed before a caller waits.
        """
        step = self._steps[number]
        if number == 0:
            tensor = self._cut(tensor)
        is_last = number == len(self._steps) - 1
        tensor = self._along(step, tensor, group, widens=is_last and self.target.dtype != tensor.dtype)
        if is_last:
            self._place(tensor)
            return self.target
        return tensor

    def _along(self, step: Step, tensor: Tensor, group: dist.ProcessGroup, *, widens: bool) -> Tensor:
        if step.primitive in REDUCING:
            tensor = tensor.movedim(self._axes.index(step.axis), 0)
            self._axes.remove(step.axis)
        tensor, (links, shape) = tensor.contiguous(), (self.rewrite.mesh.links, self._shape)
        whole = tensor.nbytes * (shape[step.axis] if step.primitive in GATHERING else 1)
        with self.times.of((links[step.axis], step.primitive, shape[step.axis], whole), tensor):
            run = partial(reduces, dtype=self.target.dtype) if widens else PRIMITIVES[step.primitive]
            result = run(tensor, group)
        if step.primitive in GATHERING:
            self._axes.insert(0, step.axis)
        return result

    def _cut(self, source: Tensor) -> Tensor:
        """Return this chunk's part of the source: [*mesh, elements] of a full tensor, [elements] of a shard."""
        if self._primitive is Primitive.all_gather:
            return source.view(-1)[self.begin : self.end]
        self._axes = list(range(len(self._shape)))
        if self._primitive is Primitive.reduce_scatter:
            return source.view(*self._shape, -1)[..., self.begin : self.end]
        chunk = source.view(-1)[self.begin : self.end]
        if not self._sharding:
            self._axes = []
            return chunk
        if missing := -chunk.numel() % self.size:
            chunk = torch.cat([chunk, chunk.new_zeros(missing)])
        return chunk.view(*self._shape, -1)

    def _place(self, tensor: Tensor) -> None:
        if self._primitive is Primitive.reduce_scatter:
            self.target.view(-1)[self.begin : self.end] = tensor
            return
        in_order = tensor.permute(*(self._axes.index(axis) for axis in range(len(self._axes))), -1)
        if self._primitive is Primitive.all_gather:
            self.target.view(*self._shape, -1)[..., self.begin : self.end] = in_order
        elif self._sharding:  # a full tensor was summed in place
            self.target.view(-1)[self.begin : self.end] = in_order.reshape(-1)[: self.end - self.begin]


def _open_axis(mesh: Mesh, axis: int, device: torch.device, timeout_s: float, name: str) -> _Axis | None:
    mine = None
    for line in mesh.subgroups(axis):
        ranks = [mesh.group.ranks[position] for position in line]
        group = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout_s), group_desc=f"{name} {mesh.shape} axis {axis}"
        )
        if dist.get_rank() in ranks:
            across = len({mesh.group.nodes[position] for position in line}) > 1 and mesh.group.at_sites
            mine = _Axis(group, executor_for(device, f"weft-{name}-{axis}", holds_host=across))
    return mine
