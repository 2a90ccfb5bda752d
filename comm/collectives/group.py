"""The group of a collective, and the meshes that partition it (Centauri section 3.1.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from math import prod


class LinkClass(Enum):
    """The class of the links between the ranks of a sub-group."""

    intra = "intra"
    """All ranks are on one node."""
    inter = "inter"
    """Every rank is on a different node."""
    mixed = "mixed"
    """Some ranks share a node: the slow links hold back the fast ones."""


@dataclass(frozen=True)
class Group:
    """The participating ranks, in the order of their shards, and the node of each.

    Attributes:
        at_sites: True if nodes are sites, with the WAN between them, and not hosts.

    Raises:
        ValueError: no ranks, ranks not ascending, or not one node per rank.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    at_sites: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"ranks={self.ranks}: a group has at least one rank, in ascending order")
        if len(self.nodes) != len(self.ranks):
            raise ValueError(f"nodes={self.nodes}: give one for each of the {len(self.ranks)} ranks")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def layout(self) -> tuple[int, ...]:
        """Number of ranks on each node, in order of first appearance."""
        return tuple(Counter(self.nodes).values())

    @property
    def flat(self) -> Mesh:
        """The one-dimensional mesh: no group partition."""
        return Mesh(self, (self.size,))

    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes that the planner considers: flat, and balanced ones that are no finer than the topology.

        Two axes of the same link class would only split a sub-group that the library already
        drives at full rate. There are two classes, so two axes at most.
        """
        order = {node: number for number, node in enumerate(dict.fromkeys(self.nodes))}
        shapes = _coarse_shapes(tuple(order[node] for node in self.nodes))
        return (self.flat, *(Mesh(self, shape) for shape in shapes))


@dataclass(frozen=True)
class Mesh:
    """A group as a d-dimensional grid of shape [N_1, ..., N_d], row-major.

    Raises:
        ValueError: the shape does not multiply to the group's size.
    """

    group: Group
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if prod(self.shape) != self.group.size or min(self.shape) < 1:
            raise ValueError(f"mesh {self.shape}: its axes must multiply to the group's {self.group.size} ranks")

    def index(self, position: int) -> tuple[int, ...]:
        """Return the coordinates of the rank at ``position`` of the group: index_k = (r / N_{k+1}...N_d) mod N_k."""
        return tuple(position // prod(self.shape[k + 1 :]) % size for k, size in enumerate(self.shape))

    def subgroups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Return the sub-groups along ``axis``: positions in the group that differ only in that coordinate."""
        return _lines(self.shape, axis)

    @cached_property
    def links(self) -> tuple[LinkClass, ...]:
        """The link class of each axis; mixed if its sub-groups differ."""
        return tuple(self._link(axis) for axis in range(len(self.shape)))

    def _link(self, axis: int) -> LinkClass:
        return _link_of(self.group.nodes, self.shape, axis)


@lru_cache(maxsize=64)
def _coarse_shapes(nodes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the shapes with one axis inside nodes and one between them. All stages of a job order nodes alike."""
    size = len(nodes)
    shapes = [(first, size // first) for first in range(2, size) if size % first == 0]
    return tuple(
        shape
        for shape in shapes
        if {_link_of(nodes, shape, axis) for axis in (0, 1)} == {LinkClass.intra, LinkClass.inter}
    )


def _link_of(nodes: tuple[int, ...], shape: Sequence[int], axis: int) -> LinkClass:
    """Return the link class of an axis, mixed if its sub-groups differ."""
    classes = {_link_class([nodes[position] for position in line]) for line in _lines(shape, axis)}
    return classes.pop() if len(classes) == 1 else LinkClass.mixed


def _lines(shape: Sequence[int], axis: int) -> tuple[tuple[int, ...], ...]:
    """Return each set of positions that differ only along ``axis`` of a row-major grid."""
    step, size = prod(shape[axis + 1 :]), prod(shape)
    length = step * shape[axis]
    return tuple(
        tuple(range(first, first + length, step))
        for block in range(0, size, length)
        for first in range(block, block + step)
    )


def _link_class(nodes: list[int]) -> LinkClass:
    distinct = len(set(nodes))
    if distinct == 1:
        return LinkClass.intra
    return LinkClass.inter if distinct == len(nodes) else LinkClass.mixed
