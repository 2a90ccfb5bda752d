"""Meshes without sub-groups of slow and fast links, in which the slow ones would hold back the fast ones."""

from weft.comm.collectives.group import Group, LinkClass, Mesh


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
