"""The search space of rewrites, the choice by cost, and the planner that remembers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from math import nan

from weft.comm.collectives.collective import SUBSTITUTIONS, Collective, Primitive, Substitution
from weft.comm.collectives.costs import CollectiveCosts
from weft.comm.collectives.group import Mesh
from weft.comm.collectives.rewrite import Rewrite, Step, plain
from weft.conf.schema import Partition

EVEN = tuple((1 / count,) * count for count in (1, 2, 4, 8))
"""The workload partitions that are considered."""


@dataclass(frozen=True)
class Choice:
    """The chosen rewrite, with its predicted cost.

    Attributes:
        cost_s: predicted seconds of the rewrite.
        plain_s: predicted seconds of the plain collective.
    """

    rewrite: Rewrite
    cost_s: float
    plain_s: float
    reason: str

    @classmethod
    def plainly(cls, collective: Collective) -> Choice:
        """Choose the plain collective, because costs are unknown."""
        return cls(plain(collective), nan, nan, "costs are unknown, or partitioning is off")


def skeletons(primitive: Primitive) -> tuple[tuple[Primitive, ...], ...]:
    """Return the primitive and its multi-step replacements in table 2, without pruned ones."""
    return ((primitive,), *(line.parts for line in _scalable(primitive) if len(line.parts) > 1))


def synonyms(primitive: Primitive) -> tuple[Primitive, ...]:
    """Return the primitive and its one-step replacements in table 2."""
    return (primitive, *(line.parts[0] for line in _scalable(primitive) if len(line.parts) == 1))


def _scalable(primitive: Primitive) -> list[Substitution]:
    return [line for line in SUBSTITUTIONS if line.primitive is primitive and not line.pruned]


def space(
    collective: Collective,
    *,
    meshes: Iterable[Mesh] | None = None,
    granularities: Iterable[tuple[float, ...]] = EVEN,
) -> Iterator[Rewrite]:
    """Yield every rewrite, over the paper's three dimensions: primitive, group and workload partition.

    Args:
        meshes: group partitions; `Group.meshes` if None.
        granularities: workload partitions, each as a tuple of shares.
    """
    granularities = tuple(granularities)
    for mesh in collective.group.meshes() if meshes is None else meshes:
        for steps in _walks(collective, mesh):
            whole = Rewrite(collective, mesh, steps)
            yield from (whole.chunked(granularity) for granularity in granularities)


def _walks(collective: Collective, mesh: Mesh) -> Iterator[tuple[Step, ...]]:
    """Yield each sequence of primitives for each order of axes. Gathers run in the reverse order of reductions."""
    primitive = collective.primitive
    for order in permutations(range(len(mesh.shape))):
        for skeleton in skeletons(primitive):
            places = [(p, axis) for part, p in enumerate(skeleton) for axis in (order[::-1] if part else order)]
            for taken in product(*(synonyms(p) for p, _ in places)):
                yield tuple(Step(p, axis) for p, (_, axis) in zip(taken, places, strict=True))


def choose(
    collective: Collective,
    costs: CollectiveCosts,
    *,
    meshes: Iterable[Mesh] | None = None,
    granularities: Iterable[tuple[float, ...]] = EVEN,
) -> Choice:
    """Return the rewrite with the least predicted time. Ties go to fewer chunks, then fewer steps."""
    simple = plain(collective)
    plain_s = costs.rewrite_s(simple)
    rewrites = space(collective, meshes=meshes, granularities=granularities)
    priced = [(costs.rewrite_s(r), len(r.granularity), len(r.steps), r) for r in rewrites]
    cost_s, *_, best = min(priced, key=lambda entry: (round(entry[0], 9), *entry[1:3]), default=(plain_s, 1, 1, simple))
    return Choice(best, cost_s, plain_s, _reason(best, simple, cost_s, plain_s, len(priced)))


def _reason(best: Rewrite, simple: Rewrite, cost_s: float, plain_s: float, count: int) -> str:
    if best == simple:
        return f"no other of {count} rewrites is faster than the plain one's {1e3 * plain_s:.3g} ms"
    gain = plain_s / cost_s if cost_s else 1.0
    return f"{1e3 * cost_s:.3g} ms, the plain one {1e3 * plain_s:.3g} ms ({gain:.2f}x); best of {count} rewrites"


UNCUT = ((1.0,),)
_GRANULARITIES: Mapping[Partition, tuple[tuple[float, ...], ...]] = {
    Partition.none: (),
    Partition.primitive: UNCUT,
    Partition.group: UNCUT,
    Partition.workload: EVEN,
}


class Planner:
    """Chooses rewrites; with equal costs all ranks choose the same."""

    def __init__(self, costs: CollectiveCosts | None, partition: Partition = Partition.workload) -> None:
        """Chooses rewrites by cost. All ranks choose the same because they have equal costs.

        Args:
            costs: costs of the group's links; None leaves collectives unchanged.
            partition: the dimensions to search; each includes those before it.
        """
        self._costs = costs if costs is not None else CollectiveCosts({})
        self._partition = partition if costs is not None else Partition.none
        self.choices: dict[Collective, Choice] = {}
        """The choices so far, with reasons."""

    def __call__(self, collective: Collective) -> Rewrite:
        """Return the rewrite of ``collective``."""
        if collective not in self.choices:
            self.choices[collective] = self._choose(collective)
        return self.choices[collective].rewrite

    def _choose(self, collective: Collective) -> Choice:
        granularities = _GRANULARITIES[self._partition]
        if not granularities:
            return Choice.plainly(collective)
        meshes = [collective.group.flat] if self._partition is Partition.primitive else None
        return choose(collective, self._costs, meshes=meshes, granularities=granularities)
