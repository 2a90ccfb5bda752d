"""A rewrite is taken if its steps, done on symbols, give what the collective gives, and refused otherwise."""

from collections import Counter
from itertools import product

import pytest

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import Collective, Mesh, Primitive, Rewrite, Step
from weft.comm.collectives.rewrite import plain

GROUP = regular(2, 2)
MESH = Mesh(GROUP, (2, 2))
WHOLE = (Primitive.all_reduce, Primitive.reduce_scatter, Primitive.all_gather)
STEPS = [Step(primitive, axis) for primitive in WHOLE for axis in (0, 1)]
REPLACED = [Step(primitive, axis) for primitive in (Primitive.reduces, Primitive.broadcasts) for axis in (0, 1)]
ONCE = Counter(range(4))
"""Contributions to a shard that is summed: one of each rank."""


def start(primitive):
    """Return for each rank the shards that it holds, with the ranks whose contributions are in each."""
    if primitive is Primitive.all_gather:
        return [{rank: ONCE} for rank in range(4)]
    return [{shard: Counter([rank]) for shard in range(4)} for rank in range(4)]


def reached(primitive, held):
    if any(count != ONCE for shards in held for count in shards.values()):
        return False
    if primitive is Primitive.reduce_scatter:
        return sorted(shard for shards in held for shard in shards) == list(range(4))
    return all(len(shards) == 4 for shards in held)


def apply(step, held):
    """Return the shards of ranks after a step; None if the step does not fit those before."""
    after = list(held)
    for line in MESH.subgroups(step.axis):
        members = [held[position] for position in line]
        if step.primitive in (Primitive.all_gather, Primitive.broadcasts):
            if members[0].keys() & members[1].keys():
                return None
            joined = members[0] | members[1]
            results = [joined, joined]
        else:
            if members[0].keys() != members[1].keys() or (len(members[0]) % 2 and step.primitive is not WHOLE[0]):
                return None
            summed = {shard: members[0][shard] + members[1][shard] for shard in sorted(members[0])}
            half = len(summed) // 2
            parts = [dict(list(summed.items())[:half]), dict(list(summed.items())[half:])]
            results = [summed, summed] if step.primitive is Primitive.all_reduce else parts
        for position, result in zip(line, results, strict=True):
            after[position] = result
    return after


def amounts_to(primitive, steps):
    held = start(primitive)
    for step in steps:
        if (held := apply(step, held)) is None:
            return False
    return reached(primitive, held)


@pytest.mark.parametrize("primitive", WHOLE)
def test_steps_are_taken_if_they_compute_the_collective(primitive):
    collective = Collective.flat(primitive, GROUP, num_elements=8, itemsize=4)
    taken = 0
    for steps in [
        *(steps for length in (1, 2, 3, 4) for steps in product(STEPS, repeat=length)),
        *(steps for length in (1, 2) for steps in product([*STEPS, *REPLACED], repeat=length)),
    ]:
        right = amounts_to(primitive, steps)
        try:
            Rewrite(collective, MESH, steps)
        except ValueError:
            assert not right, f"{steps} would compute it"
        else:
            assert right, f"{steps} compute something else"
            taken += 1
    assert taken > 5


@pytest.mark.parametrize("axis", [-1, 2])
def test_an_axis_that_the_mesh_has_not_is_refused(axis):
    collective = Collective.flat(Primitive.all_reduce, GROUP, num_elements=8, itemsize=4)
    with pytest.raises(ValueError, match="not valid here"):
        Rewrite(collective, MESH, (Step(Primitive.all_reduce, axis),))


@pytest.mark.parametrize("primitive", WHOLE)
def test_the_workload_of_the_whole_group_is_all_of_the_collective(primitive):
    assert list(plain(Collective(primitive, GROUP, (2**18,), itemsize=4)).step_bytes()) == [2**20]


def test_of_what_was_reduced_and_scattered_each_has_a_part():
    steps = Step(Primitive.reduce_scatter, 0), Step(Primitive.all_reduce, 1), Step(Primitive.all_gather, 0)
    rewrite = Rewrite(Collective(Primitive.all_reduce, GROUP, (2**18,), itemsize=4), MESH, steps)
    assert list(rewrite.step_bytes()) == [2**20, 2**19, 2**20]
