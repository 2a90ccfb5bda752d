"""Ranks along named axes; hops and DP-cells cover every neighbour once."""

from hypothesis import given
from hypothesis import strategies as st

from weft.engine.planning.dp_cells import CellMember, cells
from weft.engine.planning.hops import hops
from weft.engine.planning.layout import Position, RankLayout
from weft.pipeline.placement import Placement

LAYOUTS = st.builds(RankLayout, st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.integers(1, 5))


@given(LAYOUTS)
def test_a_rank_has_one_position_and_a_position_one_rank(layout):
    positions = [layout.position(rank) for rank in range(layout.world_size)]
    assert len(set(positions)) == layout.world_size
    assert [layout.rank(stage=at.stage, replica=at.replica) for at in positions] == list(range(layout.world_size))
    assert [at.site for at in positions] == sorted(at.site for at in positions), "a site's ranks are neighbours"
    for stage in range(layout.stages):
        first = layout.rank(stage=stage, replica=0)
        assert layout.replicas_of(stage) == tuple(range(first, first + layout.replicas)), "and so are replicas"


def test_a_position_by_hand():
    assert RankLayout((1, 2), 4).position(9) == Position(stage=2, replica=1, site=1)


@given(layout=LAYOUTS, fold=st.booleans(), size=st.integers(1, 5))
def test_every_crossing_is_in_one_cell_and_every_replica_in_one_place(layout, fold, size):
    sites = layout.sites
    placement = Placement.fold(sum(sites), sites=sites) if fold else Placement.straight(sum(sites), sites)
    inside, between = hops(placement, layout)
    assert not inside & between
    crossed = [pair for cell in cells(placement, layout, size) for pair in zip(cell.near, cell.far, strict=True)]
    assert len(crossed) == len(set(crossed)) and {hop for a, b in crossed for hop in ((a, b), (b, a))} == between
    assert all(layout.position(a).site == layout.position(b).site for a, b in inside)
    members = CellMember.all(layout, size)
    if len(sites) == 1:
        assert members == [CellMember(1, 0)] * layout.replicas
        return
    for cell in cells(placement, layout, size):
        found = [members[layout.position(rank).replica] for rank in cell.near]
        assert found == [CellMember(len(found), number) for number in range(len(found))]
