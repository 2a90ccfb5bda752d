"""A collective as a value: primitive, group and workload; and the substitutions of Centauri's table 2."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from weft.comm.collectives.group import Group


class Primitive(Enum):
    """An operation of the ranks along one axis of a group."""

    all_reduce = "all_reduce"
    reduce_scatter = "reduce_scatter"
    all_gather = "all_gather"
    reduces = "reduces"
    """One reduce per rank, each with another root: every rank receives and adds all pieces of its shard."""
    broadcasts = "broadcasts"
    """One broadcast per rank, each with another root: every rank sends its shard to all."""
    reduce = "reduce"
    scatter = "scatter"
    gather = "gather"
    broadcast = "broadcast"
    all_to_all = "all_to_all"
    """Every rank sends a different part of its tensor to each rank."""
    shift = "shift"
    """Every rank sends its tensor to the next rank; the last sends to the first."""


REDUCING = frozenset({Primitive.reduce_scatter, Primitive.reduces})
"""Primitives that turn the full tensor into this rank's shard of the sum."""
GATHERING = frozenset({Primitive.all_gather, Primitive.broadcasts})
"""Primitives that turn this rank's shard into the full tensor."""
EXECUTED = (Primitive.all_reduce, *sorted(REDUCING | GATHERING, key=lambda one: one.value), Primitive.all_to_all)
"""The primitives that ranks execute, in the order in which they measure them."""


@dataclass(frozen=True)
class Substitution:
    """A row of Centauri's table 2: a primitive and the sequence that replaces it.

    Attributes:
        pruned: why the planner never uses it, or empty if it does.
    """

    primitive: Primitive
    parts: tuple[Primitive, ...]
    pruned: str = ""


_ROOT = "its root's links carry all data, so it slows down with every rank"
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
    """A collective before it is partitioned.

    Attributes:
        primitive: all_reduce, reduce_scatter or all_gather.
        dims: shape of the full tensor; reduce-scatter and all-gather split its first dim
            into equal shards, in the group's order.
        itemsize: bytes per element.

    Raises:
        ValueError: another primitive, or a first dim that does not split evenly.
    """

    primitive: Primitive
    group: Group
    dims: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        if self.primitive not in (Primitive.all_reduce, Primitive.reduce_scatter, Primitive.all_gather):
            raise ValueError(f"{self.primitive.value}: cannot be planned; use all_reduce, reduce_scatter or all_gather")
        if self.primitive is not Primitive.all_reduce and self.dims[0] % self.group.size:
            raise ValueError(
                f"dims={self.dims}: the first must be a multiple of the group's {self.group.size} ranks; pad it"
            )

    @classmethod
    def flat(cls, primitive: Primitive, group: Group, *, num_elements: int, itemsize: int) -> Collective:
        """Create a collective over a flat buffer of ``num_elements`` in total (all shards)."""
        return cls(primitive, group, (num_elements,), itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor (the paper's D)."""
        return prod(self.dims) * self.itemsize

    def __str__(self) -> str:
        nodes = len(set(self.group.nodes))
        dims = " x ".join(map(str, self.dims))
        return f"{self.primitive.value} of [{dims}] x {self.itemsize} B over {self.group.size} ranks on {nodes} nodes"
