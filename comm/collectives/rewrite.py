"""A rewrite: a collective as primitives along the axes of a mesh, pipelined in chunks."""

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
    """One way to execute a collective, with the same result as the plain one.

    Attributes:
        steps: executed in order for each chunk; chunks are pipelined through the steps.
        granularity: each chunk's share of the workload; they sum to 1.

    Raises:
        ValueError: the steps do not compute the collective, or the shares do not sum to 1.
    """

    collective: Collective
    mesh: Mesh
    steps: tuple[Step, ...]
    granularity: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.mesh.group != self.collective.group:
            raise ValueError(f"{self}: the mesh belongs to another group")
        if min(self.granularity, default=0.0) <= 0 or not isclose(sum(self.granularity), 1.0):
            raise ValueError(f"granularity={self.granularity}: shares must be above 0 and sum to 1")
        _check(self)

    def chunked(self, granularity: Sequence[float]) -> Rewrite:
        """Return a copy whose chunks are these shares of the workload."""
        return replace(self, granularity=tuple(granularity))

    @property
    def sums_last(self) -> bool:
        """True if the last step of a reduce-scatter sums received parts on this rank, in any wider format."""
        return self.collective.primitive is Primitive.reduce_scatter and self.steps[-1].primitive is Primitive.reduces

    def bounds(self, length: int) -> list[tuple[int, int]]:
        """Return the begin and end of each chunk in a buffer of ``length``, without empty chunks."""
        ends = [round(share * length) for share in accumulate(self.granularity)]
        return [(begin, end) for begin, end in pairwise([0, *ends[:-1], length]) if begin < end]

    def step_bytes(self) -> Iterator[float]:
        """Yield the workload of one sub-group in each step, in bytes over all chunks."""
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
    """Return the collective without rewriting: one primitive, the whole group, one chunk."""
    return Rewrite(collective, collective.group.flat, (Step(collective.primitive, 0),))


def _chunks_text(granularity: tuple[float, ...]) -> str:
    count = len(granularity)
    if count == 1:
        return "1 chunk"
    even = all(isclose(share, 1 / count) for share in granularity)
    return f"{count} chunks" if even else f"{count} chunks " + " ".join(f"{share:.3g}" for share in granularity)


def _check(rewrite: Rewrite) -> None:
    """Check the steps, by tracking which axes are reduced, and along which axes ranks hold shards."""
    axes = set(range(len(rewrite.mesh.shape)))
    primitive = rewrite.collective.primitive
    summed: set[int] = set(axes) if primitive is Primitive.all_gather else set()
    sharded: set[int] = set(axes) if primitive is Primitive.all_gather else set()
    for step in rewrite.steps:
        fits = step.axis in axes and (
            step.axis in sharded if step.primitive in GATHERING else step.axis not in summed | sharded
        )
        if not fits:
            raise ValueError(
                f"{rewrite.collective}: step {step.primitive.value} along axis {step.axis} is not valid here"
            )
        if step.primitive in GATHERING:
            sharded.remove(step.axis)
        else:
            summed.add(step.axis)
        if step.primitive in REDUCING:
            sharded.add(step.axis)
    if summed != axes or sharded != (axes if primitive is Primitive.reduce_scatter else set()):
        raise ValueError(f"{rewrite.collective}: the steps {rewrite.steps} compute something else")
