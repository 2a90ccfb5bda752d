"""The rewrite: a collective as primitives along the axes of a mesh, cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import isclose

from weft.comm.collectives.collective import GATHERING, REDUCING, Collective, Primitive
from weft.comm.collectives.group import Mesh


@dataclass(frozen=True)
class Step:
    """A primitive on every sub-group along one axis of the mesh."""

    primitive: Primitive
    axis: int


@dataclass(frozen=True)
class Rewrite:
    """One way to carry out a collective; it gives what the plain one gives.

    Attributes:
        collective: what is to be done.
        mesh: the group partition.
        steps: done one after the other on each chunk; different chunks may be in different steps.
        granularity: shares of the workload, one for each chunk; they sum to 1.

    Raises:
        ValueError: the steps do not amount to the collective, or the shares not to 1.
    """

    collective: Collective
    mesh: Mesh
    steps: tuple[Step, ...]
    granularity: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        """Refuse steps that do something else."""
        if self.mesh.group != self.collective.group:
            raise ValueError(f"{self}: the mesh is of another group")
        if min(self.granularity, default=0.0) <= 0 or not isclose(sum(self.granularity), 1.0):
            raise ValueError(f"granularity={self.granularity}: shares must be above 0 and sum to 1")
        _check(self)

    def chunked(self, granularity: Sequence[float]) -> Rewrite:
        """The same with the workload cut into chunks of these shares."""
        return replace(self, granularity=tuple(granularity))

    def of(self, collective: Collective) -> Rewrite:
        """The same way for another workload of the same primitive and group."""
        return replace(self, collective=collective)

    def bounds(self, length: int) -> list[tuple[int, int]]:
        """Begin and end of each chunk along a buffer of ``length``; empty chunks are left out."""
        ends = [round(share * length) for share in accumulate(self.granularity)]
        return [(begin, end) for begin, end in pairwise([0, *ends[:-1], length]) if begin < end]

    def step_bytes(self) -> Iterator[float]:
        """For each step, the whole workload of one of its sub-groups in bytes (all chunks)."""
        shares = self.collective.group.size if self.collective.primitive is Primitive.all_gather else 1
        for step in self.steps:
            size = self.mesh.shape[step.axis]
            if step.primitive in GATHERING:
                shares //= size
            yield self.collective.num_bytes / shares
            if step.primitive in REDUCING:
                shares *= size

    def __str__(self) -> str:
        parts = [
            f"{step.primitive.value} {self.mesh.links[step.axis].value} {self.mesh.shape[step.axis]}"
            for step in self.steps
        ]
        return f"{', '.join(parts)} | {_chunks_text(self.granularity)}"


def plain(collective: Collective) -> Rewrite:
    """The collective as it is: one primitive, the whole group, one chunk."""
    return Rewrite(collective, collective.group.flat, (Step(collective.primitive, 0),))


def _chunks_text(granularity: tuple[float, ...]) -> str:
    count = len(granularity)
    if count == 1:
        return "1 chunk"
    even = all(isclose(share, 1 / count) for share in granularity)
    return f"{count} chunks" if even else f"{count} chunks " + " ".join(f"{share:.3g}" for share in granularity)


def _check(rewrite: Rewrite) -> None:
    """Follow which axes are summed, and along which each rank holds a shard only."""
    axes = set(range(len(rewrite.mesh.shape)))
    primitive = rewrite.collective.primitive
    summed: set[int] = set(axes) if primitive is Primitive.all_gather else set()
    sharded: set[int] = set(axes) if primitive is Primitive.all_gather else set()
    for step in rewrite.steps:
        fits = step.axis in axes and (
            step.axis in sharded if step.primitive in GATHERING else step.axis not in summed | sharded
        )
        if not fits:
            raise ValueError(f"{rewrite.collective}: step {step.primitive.value} along axis {step.axis} does not fit")
        if step.primitive in GATHERING:
            sharded.remove(step.axis)
        else:
            summed.add(step.axis)
        if step.primitive in REDUCING:
            sharded.add(step.axis)
    if summed != axes or sharded != (axes if primitive is Primitive.reduce_scatter else set()):
        raise ValueError(f"{rewrite.collective}: the steps {rewrite.steps} amount to something else")
