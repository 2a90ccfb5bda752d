"""Groups, meshes, rewrites and their costs as values."""

from itertools import combinations
from math import isclose, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.collectives.balanced import balanced_meshes, is_balanced, regular
from weft.comm.collectives import (
    AlphaBeta,
    Collective,
    CollectiveCosts,
    Group,
    LinkClass,
    Mesh,
    Primitive,
    Rewrite,
    Step,
    choose,
    plain,
)
from weft.comm.collectives.collective import EXECUTED
from weft.comm.collectives.costs import fit
from weft.comm.collectives.space import space

TWO_BY_TWO = regular(2, 2)
SLOW_BETWEEN = CollectiveCosts.of_links(
    {LinkClass.intra: AlphaBeta(1e-5, 1e-10), LinkClass.inter: AlphaBeta(1e-3, 1e-8)}
)
ALL_TO_ALL = Primitive.all_to_all
WHOLE = (Primitive.all_reduce, Primitive.reduce_scatter, Primitive.all_gather)


def wish(primitive, group=TWO_BY_TWO, elements=2**20):
    return Collective.flat(primitive, group, num_elements=elements, itemsize=4)


@st.composite
def meshes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    nodes = draw(st.lists(st.integers(0, 3), min_size=prod(shape), max_size=prod(shape)))
    return Mesh(Group(tuple(range(prod(shape))), tuple(nodes)), shape)


@given(meshes())
def test_sub_groups_differ_in_one_coordinate(mesh):
    for axis in range(len(mesh.shape)):
        lines = mesh.subgroups(axis)
        assert sorted(p for line in lines for p in line) == list(range(mesh.group.size))
        for line in lines:
            assert len(line) == mesh.shape[axis]
            assert list(line) == sorted(line)
            assert len({mesh.index(p)[:axis] + mesh.index(p)[axis + 1 :] for p in line}) == 1


@given(meshes())
def test_a_balanced_mesh_has_links_of_one_class_in_each_sub_group(mesh):
    nodes = mesh.group.nodes
    same = [
        {nodes[a] == nodes[b] for a, b in combinations(line, 2)}
        for axis in range(len(mesh.shape))
        for line in mesh.subgroups(axis)
    ]
    if is_balanced(mesh):
        assert all(len(found) <= 1 for found in same)


def test_meshes_follow_the_topology():
    assert [mesh.shape for mesh in TWO_BY_TWO.meshes()] == [(4,), (2, 2)]
    assert Mesh(TWO_BY_TWO, (2, 2)).links == (LinkClass.inter, LinkClass.intra)
    eight = regular(2, 4)
    assert [mesh.shape for mesh in eight.meshes()] == [(8,), (2, 4)]
    assert {mesh.shape for mesh in balanced_meshes(eight)} == {(2, 4), (2, 2, 2)}
    assert not is_balanced(Mesh(eight, (4, 2)))
    assert [mesh.shape for mesh in Group((0, 1, 2, 3), (0, 0, 0, 1)).meshes()] == [(4,)]
    assert [mesh.shape for mesh in regular(1, 4).meshes()] == [(4,)]


def test_a_group_that_is_none_is_refused():
    with pytest.raises(ValueError, match="ascending"):
        Group((1, 0), (0, 0))
    with pytest.raises(ValueError, match="one for each of the 2 ranks"):
        Group((0, 1), (0,))
    with pytest.raises(ValueError, match="multiply to the group's 4 ranks"):
        Mesh(TWO_BY_TWO, (2, 3))
    with pytest.raises(ValueError, match="multiple of the group's 4 ranks"):
        wish(Primitive.all_gather, elements=6)


def test_steps_that_amount_to_something_else_are_refused():
    mesh = Mesh(TWO_BY_TWO, (2, 2))
    inter, intra = Step(Primitive.reduce_scatter, 0), Step(Primitive.reduce_scatter, 1)
    Rewrite(wish(Primitive.reduce_scatter), mesh, (intra, inter))
    for steps in [(intra,), (intra, intra), (intra, Step(Primitive.all_reduce, 0)), (intra, inter, inter)]:
        with pytest.raises(ValueError, match=r"is not valid here|something else"):
            Rewrite(wish(Primitive.reduce_scatter), mesh, steps)
    with pytest.raises(ValueError, match="sum to 1"):
        plain(wish(Primitive.all_reduce)).chunked((0.5, 0.4))


@pytest.mark.parametrize("primitive", WHOLE)
def test_rewrites_print_what_they_do(primitive):
    lines = [str(rewrite) for rewrite in space(wish(primitive))]
    assert len(set(lines)) == len(lines)
    assert lines[0] == f"{primitive.value} mixed 4 | 1 chunk"
    assert all("reduce +" not in line for line in lines)


@pytest.mark.parametrize("primitive", WHOLE)
def test_an_axis_of_one_rank_is_as_good_as_none(primitive):
    def least_s(shape):
        found = space(wish(primitive), meshes=[Mesh(TWO_BY_TWO, shape)])
        return min(SLOW_BETWEEN.rewrite_s(rewrite) for rewrite in found)

    assert least_s((4, 1)) == least_s((1, 4)) == pytest.approx(least_s((4,)), rel=1e-9)
    alone = Group((3,), (0,))
    for rewrite in space(wish(primitive, alone)):
        assert {step.axis for step in rewrite.steps} == {0} and SLOW_BETWEEN.rewrite_s(rewrite) == 0.0


def test_workloads_are_cut_into_up_to_eight_even_chunks():
    found = {rewrite.granularity for rewrite in space(wish(Primitive.all_reduce))}
    assert found == {(1.0,), (0.5,) * 2, (0.25,) * 4, (0.125,) * 8}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 200))
def test_chunks_cover_the_buffer_once(weights, length):
    rewrite = plain(wish(Primitive.all_reduce)).chunked([weight / sum(weights) for weight in weights])
    covered = [place for begin, end in rewrite.bounds(length) for place in range(begin, end)]
    assert covered == list(range(length))


def test_a_hierarchical_gather_spares_the_slow_link():
    best = choose(wish(Primitive.all_gather), SLOW_BETWEEN, granularities=[(1.0,)])
    assert [best.rewrite.mesh.links[step.axis] for step in best.rewrite.steps] == [LinkClass.inter, LinkClass.intra]
    assert list(best.rewrite.step_bytes()) == [2**21, 2**22]
    assert best.cost_s < best.plain_s
    scattered = choose(wish(Primitive.reduce_scatter), SLOW_BETWEEN, granularities=[(1.0,)])
    links = [scattered.rewrite.mesh.links[step.axis] for step in scattered.rewrite.steps]
    assert links == [LinkClass.intra, LinkClass.inter]
    summed = choose(wish(Primitive.all_reduce), SLOW_BETWEEN)
    assert len(summed.rewrite.steps) == 4


@pytest.mark.parametrize("primitive", WHOLE)
def test_the_choice_is_the_cheapest(primitive):
    choice = choose(wish(primitive), SLOW_BETWEEN)
    costs = [SLOW_BETWEEN.rewrite_s(rewrite) for rewrite in space(wish(primitive))]
    assert isclose(choice.cost_s, min(costs), abs_tol=1e-9)
    assert choice.plain_s == SLOW_BETWEEN.rewrite_s(plain(wish(primitive)))
    assert f"({choice.plain_s / choice.cost_s:.2f}x); best of {len(costs)} rewrites" in choice.reason
    alone = Collective.flat(primitive, regular(1, 2), num_elements=2, itemsize=4)
    kept = choose(alone, SLOW_BETWEEN)
    assert kept.rewrite == plain(alone) and kept.cost_s == kept.plain_s
    assert f"no other of {len(list(space(alone)))} rewrites is faster" in kept.reason


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((1.0,), "1 chunk"),
        ((0.5, 0.5), "2 chunks"),
        ((1 / 3, 1 / 6, 1 / 2), "3 chunks 0.333 0.167 0.5"),
        ((0.25, 0.75), "2 chunks 0.25 0.75"),
    ],
)
def test_chunks_are_printed_with_their_shares_unless_these_are_even(shares, told):
    assert str(plain(wish(Primitive.all_reduce)).chunked(shares)).endswith(f" | {told}")


@pytest.mark.parametrize("shares", [(), (0.0, 1.0), (-0.5, 1.5), (0.5, 0.6)])
def test_shares_that_are_no_cut_are_refused(shares):
    with pytest.raises(ValueError, match="shares must be above 0 and sum to 1"):
        plain(wish(Primitive.all_reduce)).chunked(shares)


def test_chunks_flow_through_the_steps_like_a_pipeline():
    links = {LinkClass.intra: AlphaBeta(0.0, 1e-8), LinkClass.inter: AlphaBeta(0.0, 2e-8)}
    costs = CollectiveCosts.of_links(links)
    rewrite = next(r for r in space(wish(Primitive.all_gather)) if len(r.steps) == 2)
    first, second = costs.steps_s(rewrite)
    assert isclose(costs.rewrite_s(rewrite), first + second)
    assert isclose(costs.rewrite_s(rewrite.chunked((0.5, 0.5))), max(first, second) + min(first, second) / 2)


def test_unmeasured_links_are_named():
    with pytest.raises(ValueError, match="all_gather over mixed links: not measured"):
        CollectiveCosts({}).rewrite_s(plain(wish(Primitive.all_gather)))


@given(st.floats(1e-6, 1e-1), st.floats(1e-12, 1e-7), st.integers(1, 7))
def test_the_fit_finds_the_line(alpha_s, beta_s, rounds):
    sizes = [2.0**k for k in range(10, 26, 3)]
    line = fit([(rounds, size, rounds * alpha_s + size * beta_s) for size in sizes])
    for size in sizes:
        assert isclose(rounds * line.alpha_s + size * line.beta_s, rounds * alpha_s + size * beta_s, rel_tol=1e-4)


@given(st.lists(st.tuples(st.floats(1e3, 1e8), st.floats(1e-5, 1.0)), min_size=2, max_size=8))
def test_no_cost_is_negative(samples):
    line = fit([(1, size, seconds) for size, seconds in samples])
    assert line.alpha_s >= 0
    assert line.beta_s >= 0


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(1e3, 1e8), st.floats(1e-5, 1.0)), min_size=2, max_size=8))
def test_no_other_line_fits_better(samples):
    """The conditions of Karush, Kuhn and Tucker for the sum of squared relative errors."""
    line = fit(samples)
    rows = [(rounds / seconds, size / seconds) for rounds, size, seconds in samples]
    errors = [line.alpha_s * x + line.beta_s * y - 1 for x, y in rows]
    for value, column in ((line.alpha_s, 0), (line.beta_s, 1)):
        slope = sum(row[column] * error for row, error in zip(rows, errors, strict=True))
        scale = sum(row[column] * (1 + abs(error)) for row, error in zip(rows, errors, strict=True))
        assert slope >= -1e-6 * scale
        assert not value or slope <= 1e-6 * scale


def test_chunks_lie_end_to_end():
    chunked = plain(wish(Primitive.all_reduce)).chunked((0.2, 0.3, 0.5))
    assert chunked.bounds(10) == [(0, 2), (2, 5), (5, 10)]
    assert chunked.bounds(1) == [(0, 1)]  # those of nothing are left out
    assert plain(wish(Primitive.all_reduce)).bounds(7) == [(0, 7)]


def test_gathers_go_back_the_way_that_reductions_came():
    found = 0
    for rewrite in space(wish(Primitive.all_reduce), granularities=((1.0,),)):
        axes = [step.axis for step in rewrite.steps]
        kinds = [step.primitive for step in rewrite.steps]
        if len(axes) == 4 and kinds[0] is Primitive.reduce_scatter and kinds[-1] is Primitive.all_gather:
            assert axes[:2] == axes[:1:-1], rewrite
            found += 1
    assert found >= 2  # one for each order of the two axes


@given(st.integers(1, 6), st.integers(1, 6), st.randoms())
def test_meshes_are_the_balanced_ones_with_axes_of_different_links(num_nodes, ranks_per_node, random):
    nodes = [node for node in range(num_nodes) for _ in range(ranks_per_node)]
    if random.random() < 0.5:
        random.shuffle(nodes)
    group = Group(tuple(range(len(nodes))), tuple(nodes))
    coarse = [mesh for mesh in balanced_meshes(group) if len(set(mesh.links)) == len(mesh.links)]
    assert list(group.meshes()) == [group.flat, *coarse]


def test_meshes_of_a_large_group_are_those_of_its_nodes():
    group = regular(128, 8)
    assert [mesh.shape for mesh in group.meshes()] == [(1024,), (128, 8)]
    assert group.layout == (8,) * 128


@given(st.integers(2, 64), st.floats(1, 1e12), st.floats(0, 1), st.floats(1e-12, 1e-6))
def test_an_all_to_all_moves_all_but_a_ranks_own_part(size, num_bytes, alpha_s, beta_s):
    """At a cost of its own: it stays what it is where a gather takes longer."""
    slow, own = AlphaBeta(1.0, 1.0), AlphaBeta(alpha_s, beta_s)
    costs = CollectiveCosts({(LinkClass.intra, Primitive.all_gather): slow, (LinkClass.intra, ALL_TO_ALL): own})
    found = costs.step_s(ALL_TO_ALL, LinkClass.intra, size, num_bytes)
    assert isclose(found, (size - 1) * alpha_s + num_bytes * (size - 1) / size * beta_s)


@given(st.integers(1, 64), st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)))
def test_more_bytes_never_take_less(size, sizes):
    for primitive in EXECUTED:
        less, more = (SLOW_BETWEEN.step_s(primitive, LinkClass.inter, size, each) for each in sorted(sizes))
        assert 0 <= less <= more


@pytest.mark.parametrize("primitive", EXECUTED)
def test_empty_tensors_and_groups_of_one_take_no_time(primitive):
    """True if or not such links were measured."""
    for costs in (SLOW_BETWEEN, CollectiveCosts({})):
        assert costs.step_s(primitive, LinkClass.inter, 1, 1e9) == 0.0
        assert costs.step_s(primitive, LinkClass.inter, 4, 0) == 0.0
    assert SLOW_BETWEEN.step_s(primitive, LinkClass.inter, 2, 1) > 0.0


def test_a_mesh_of_another_group_and_a_fit_of_one_measurement_are_refused():
    other = regular(1, 4)
    with pytest.raises(ValueError, match="the mesh belongs to another group"):
        Rewrite(wish(Primitive.all_reduce), other.flat, (Step(Primitive.all_reduce, 0),))
    with pytest.raises(ValueError, match="at least two measurements"):
        fit([(1, 1.0, 1.0)])
    with pytest.raises(ValueError, match="broadcast: cannot be planned; use all_reduce"):
        wish(Primitive.broadcast)
