"""The collective: a primitive, a group and a workload, and what may stand for a primitive."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from weft.comm.collectives.group import Group


class Primitive(Enum):
    """What is done to the workload along a group; the last two are one operation with each rank as a root."""

    all_reduce = "all_reduce"
    reduce_scatter = "reduce_scatter"
    all_gather = "all_gather"
    reduces = "reduces"
    """Reduces of distinct roots: each rank gets and adds everybody's piece of its own shard."""
    broadcasts = "broadcasts"
    """Broadcasts of distinct roots: each rank hands its shard to all."""
    reduce = "reduce"
    scatter = "scatter"
    gather = "gather"
    broadcast = "broadcast"


REDUCING = frozenset({Primitive.reduce_scatter, Primitive.reduces})
"""From the whole to this rank's shard of the sum."""
GATHERING = frozenset({Primitive.all_gather, Primitive.broadcasts})
"""From this rank's shard to the whole."""


@dataclass(frozen=True)
class Substitution:
    """A line of Centauri's table 2.

    Attributes:
        pruned: why the planner never takes it; empty if it scales.
    """

    primitive: Primitive
    parts: tuple[Primitive, ...]
    pruned: str = ""


_ROOT = "the links of its one root carry everybody's data, so it gets slower with every rank"
SUBSTITUTIONS = (
    Substitution(Primitive.all_reduce, (Primitive.reduce, Primitive.broadcast), _ROOT),
    Substitution(Primitive.all_reduce, (Primitive.reduce_scatter, Primitive.all_gather)),
    Substitution(Primitive.reduce_scatter, (Primitive.reduce, Primitive.scatter), f"twice the latency, and {_ROOT}"),
    Substitution(Primitive.reduce_scatter, (Primitive.reduces,)),
    Substitution(Primitive.all_gather, (Primitive.gather, Primitive.broadcast), f"twice the latency, and {_ROOT}"),
    Substitution(Primitive.all_gather, (Primitive.broadcasts,)),
)
"""Centauri table 2."""


@dataclass(frozen=True)
class Collective:
    """A collective, before it is partitioned.

    Attributes:
        primitive: all_reduce, reduce_scatter or all_gather.
        group: who takes part.
        dims: shape of the whole workload; reduce-scatter and all-gather cut its first dim
            into equal shards, in the group's order.
        itemsize: bytes of an element.

    Raises:
        ValueError: another primitive, or a first dim that cannot be cut evenly.
    """

    primitive: Primitive
    group: Group
    dims: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        if self.primitive not in (Primitive.all_reduce, Primitive.reduce_scatter, Primitive.all_gather):
            raise ValueError(f"{self.primitive.value}: describe an all_reduce, a reduce_scatter or an all_gather")
        if self.primitive is not Primitive.all_reduce and self.dims[0] % self.group.size:
            raise ValueError(
                f"dims={self.dims}: the first must be a multiple of the group's {self.group.size} ranks; pad it"
            )

    @classmethod
    def flat(cls, primitive: Primitive, group: Group, *, num_elements: int, itemsize: int) -> Collective:
        """Over a flat buffer of ``num_elements`` altogether (of all shards)."""
        return cls(primitive, group, (num_elements,), itemsize)

    @property
    def num_bytes(self) -> int:
        """Volume D of the whole workload."""
        return prod(self.dims) * self.itemsize

    def __str__(self) -> str:
        nodes = len(set(self.group.nodes))
        dims = " x ".join(map(str, self.dims))
        return f"{self.primitive.value} of [{dims}] x {self.itemsize} B over {self.group.size} ranks on {nodes} nodes"
