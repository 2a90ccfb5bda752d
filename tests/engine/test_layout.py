"""Ranks along named axes; groups, hops and DP-cells cover every neighbour once."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.engine.layout import CellMember, Position, RankLayout, dp_cells, hops
from weft.pipeline.placement import Placement


@st.composite
def layouts(draw):
    """With several routes, each cut into sites in a way of its own."""
    routes, stages = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    sites: list[int] = []
    for _ in range(routes):
        cuts = sorted(draw(st.sets(st.integers(1, stages - 1), max_size=2))) if stages > 1 else []
        sites += [there - here for here, there in pairwise([0, *cuts, stages])]
    size = st.integers(1, 3)
    replicas = routes * draw(size)
    return RankLayout(tuple(sites), replicas, context=draw(size), tensor=draw(size), routes=routes)


LAYOUTS = layouts()


@given(LAYOUTS)
def test_a_rank_has_one_position_and_a_position_one_rank(layout):
    positions = [layout.position(rank) for rank in range(layout.world_size)]
    assert len(set(positions)) == layout.world_size
    assert [
        layout.rank(stage=at.stage, replica=at.replica, context=at.context, tensor=at.tensor) for at in positions
    ] == list(range(layout.world_size))
    assert [at.site for at in positions] == sorted(at.site for at in positions), "a site's ranks are neighbours"
    for rank, at in enumerate(positions):
        assert layout.lines_of(at.stage)[at.line] == rank


def test_a_position_by_hand():
    assert RankLayout((1, 2), 4).position(9) == Position(stage=2, replica=1, line=1, site=1)
    by_route = RankLayout((1, 1, 2), 4, routes=2)
    assert by_route.position(3) == Position(stage=1, replica=1, line=1, site=1)
    assert by_route.position(4) == Position(stage=0, replica=2, line=2, site=2)
    assert by_route.lines_of(1) == (2, 3, 6, 7) and by_route.reference == 0
    assert [by_route.sites_of(route) for route in (0, 1)] == [(1, 1), (2,)]
    layout = RankLayout((1, 1), replicas=2, context=2, tensor=2)
    assert layout.position(13) == Position(stage=1, replica=1, context=0, tensor=1, line=5, site=1)


@given(LAYOUTS, st.data())
def test_every_rank_is_in_one_group_of_each_kind_and_differs_along_its_axis_alone(layout, data):
    sizes = [size for size in range(1, layout.data_ranks + 1) if layout.data_ranks % size == 0]
    layout = replace(layout, expert=data.draw(st.sampled_from([1, *(layout.tensor * size for size in sizes)])))
    for stage in range(layout.stages):
        for kind in (layout.tensor_groups, layout.context_groups, layout.data_groups, layout.expert_groups):
            groups = kind(stage)
            assert sorted(rank for group in groups for rank in group) == list(layout.lines_of(stage))
        at = layout.position
        for group in layout.tensor_groups(stage):
            assert len({(at(rank).replica, at(rank).context) for rank in group}) == 1
            assert [at(rank).tensor for rank in group] == list(range(layout.tensor))
        for group in layout.context_groups(stage):
            assert len({(at(rank).replica, at(rank).tensor) for rank in group}) == 1
            assert [at(rank).context for rank in group] == list(range(layout.context))
        for group in layout.data_groups(stage):
            assert len({at(rank).tensor for rank in group}) == 1 and len(group) == layout.data_ranks
        for group in layout.tensor_groups(stage) if layout.expert > 1 else ():
            assert any(set(group) <= set(experts) for experts in layout.expert_groups(stage))
        for group in layout.expert_data_groups(stage) if layout.expert > 1 else ():
            assert len({at(rank).tensor for rank in group}) == 1
        for experts in layout.expert_groups(stage):
            for same in layout.expert_data_groups(stage):
                assert len(set(experts) & set(same)) in (0, 1), "who shares experts holds different ones"


@given(layout=LAYOUTS, fold=st.booleans(), size=st.integers(1, 5))
def test_every_crossing_is_in_one_cell_and_every_replica_in_one_place(layout, fold, size):
    placement = Placement.fold(layout.stages) if fold else Placement.straight(layout.stages)
    inside, between = hops(placement, layout)
    assert not inside & between
    crossed = [pair for cell in dp_cells(placement, layout, size) for pair in zip(cell.near, cell.far, strict=True)]
    assert len(crossed) == len(set(crossed)) and {hop for a, b in crossed for hop in ((a, b), (b, a))} == between
    assert all(layout.position(a).site == layout.position(b).site for a, b in inside)
    assert all(layout.position(a).site != layout.position(b).site for a, b in between)
    members = CellMember.all(layout, size)
    if len(layout.sites) == layout.routes:
        assert members == [CellMember(1, 0)] * layout.lines
        return
    for cell in dp_cells(placement, layout, size):
        found = [members[layout.position(rank).line] for rank in cell.near]
        assert found == [CellMember(len(found), number) for number in range(len(found))]
