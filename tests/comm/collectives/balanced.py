"""Groups on nodes of equal size, and meshes without sub-groups of slow and fast links."""

from weft.comm.collectives.group import Group, LinkClass, Mesh


def regular(num_nodes, ranks_per_node):
    """A group of ranks 0, 1, ... node by node."""
    ranks = tuple(range(num_nodes * ranks_per_node))
    return Group(ranks, tuple(rank // ranks_per_node for rank in ranks))


def is_balanced(mesh):
    return LinkClass.mixed not in mesh.links


def balanced_meshes(group: Group):
    """Every one of two or more axes."""
    return [mesh for shape in _factorings(group.size) if is_balanced(mesh := Mesh(group, shape))]


def _factorings(number):
    """All ordered factorisations into two or more factors above 1."""
    for first in range(2, number):
        if number % first == 0:
            yield (first, number // first)
            yield from ((first, *rest) for rest in _factorings(number // first))
