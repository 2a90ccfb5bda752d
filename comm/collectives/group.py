"""The group of a collective, and the meshes that partition it (Centauri section 3.1.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod


class LinkClass(Enum):
    """What joins the ranks of a sub-group."""

    intra = "intra"
    """All ranks on one node."""
    inter = "inter"
    """Every rank on a node of its own."""
    mixed = "mixed"
    """Some of both: the slow links hold the fast ones back."""


@dataclass(frozen=True)
class Group:
    """Ranks that take part, ascending as their shards are, and the node of each.

    Raises:
        ValueError: there are no ranks, they do not ascend, or the nodes are not one for each.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what is no group."""
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"ranks={self.ranks}: a group has at least one rank, in ascending order")
        if len(self.nodes) != len(self.ranks):
            raise ValueError(f"nodes={self.nodes}: give one for each of the {len(self.ranks)} ranks")

    @classmethod
    def regular(cls, num_nodes: int, ranks_per_node: int) -> Group:
        """Ranks 0, 1, ... on nodes of equal size, node after node."""
        ranks = tuple(range(num_nodes * ranks_per_node))
        return cls(ranks, tuple(rank // ranks_per_node for rank in ranks))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def ranks_per_node(self) -> int:
        """Ranks on the fullest node."""
        return max(self.layout)

    @property
    def layout(self) -> tuple[int, ...]:
        """Ranks on each node, in the order in which the nodes come."""
        return tuple(self.nodes.count(node) for node in dict.fromkeys(self.nodes))

    @property
    def flat(self) -> Mesh:
        """The mesh that partitions nothing."""
        return Mesh(self, (self.size,))

    def balanced_meshes(self) -> tuple[Mesh, ...]:
        """Every mesh of two or more axes whose sub-groups have links of one class each.

        The others are excluded: a slow link in a sub-group would hold back its fast ones.
        """
        return tuple(mesh for shape in _factorings(self.size) if (mesh := Mesh(self, shape)).is_balanced)

    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes worth considering: flat, and balanced ones that are no finer than the topology.

        Two neighbouring axes of one link class only cut a sub-group that the library already
        drives at full rate into smaller ones, so such meshes are left out.
        """
        coarse = (mesh for mesh in self.balanced_meshes() if len(set(mesh.links)) == len(mesh.links))
        return (self.flat, *coarse)


@dataclass(frozen=True)
class Mesh:
    """A group laid out as a d-dimensional grid of shape [N_1, ..., N_d], the last axis fastest.

    Raises:
        ValueError: the shape does not hold exactly the group.
    """

    group: Group
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a shape that does not fit."""
        if prod(self.shape) != self.group.size or min(self.shape) < 1:
            raise ValueError(f"mesh {self.shape}: its axes must multiply to the group's {self.group.size} ranks")

    def index(self, position: int) -> tuple[int, ...]:
        """Coordinates of the rank at ``position`` of the group: index_k = (r / N_{k+1}...N_d) mod N_k."""
        return tuple(position // prod(self.shape[k + 1 :]) % size for k, size in enumerate(self.shape))

    def subgroups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The sub-groups along ``axis``, as positions in the group: ranks that differ in that coordinate alone."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for position in range(self.group.size):
            index = self.index(position)
            lines.setdefault(index[:axis] + index[axis + 1 :], []).append(position)
        return tuple(tuple(line) for line in lines.values())

    @cached_property
    def links(self) -> tuple[LinkClass, ...]:
        """The link class of each axis; mixed unless all its sub-groups agree."""
        return tuple(self._link(axis) for axis in range(len(self.shape)))

    @property
    def is_balanced(self) -> bool:
        """Whether no sub-group has links of different classes."""
        return LinkClass.mixed not in self.links

    def _link(self, axis: int) -> LinkClass:
        found = {_link_class([self.group.nodes[p] for p in line]) for line in self.subgroups(axis)}
        return found.pop() if len(found) == 1 else LinkClass.mixed


def _link_class(nodes: list[int]) -> LinkClass:
    distinct = len(set(nodes))
    if distinct == 1:
        return LinkClass.intra
    return LinkClass.inter if distinct == len(nodes) else LinkClass.mixed


def _factorings(number: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write ``number`` as a product of two or more factors above 1."""
    for first in range(2, number):
        if number % first == 0:
            yield (first, number // first)
            yield from ((first, *rest) for rest in _factorings(number // first))
