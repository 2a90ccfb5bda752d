"""Hops, cells and seats cover every neighbour once; probed links go where none was given."""

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from weft.comm.wan.probe import LinkProfile
from weft.conf.schema import ClusterConfig, LinkConfig, SiteConfig
from weft.engine.planning.crossings import Seat, cells, hops, with_probed_links
from weft.pipeline.costs import CostModel
from weft.pipeline.placement import Placement


@given(
    sites=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    fold=st.booleans(),
    replicas=st.integers(1, 5),
    size=st.integers(1, 5),
)
def test_every_crossing_is_in_one_cell_and_every_replica_in_one_seat(sites, fold, replicas, size):
    placement = Placement.fold(sum(sites), sites=sites) if fold else Placement.straight(sum(sites), sites)
    inside, between = hops(placement, replicas)
    assert not inside & between
    crossed = [pair for cell in cells(placement, replicas, size) for pair in zip(cell.near, cell.far, strict=True)]
    assert len(crossed) == len(set(crossed)) and {hop for a, b in crossed for hop in ((a, b), (b, a))} == between
    assert all(placement.rank_sites[a // replicas] == placement.rank_sites[b // replicas] for a, b in inside)
    seats = Seat.all(placement, replicas, size)
    if len(sites) == 1:
        assert seats == [Seat(1, 0)] * replicas
        return
    for cell in cells(placement, replicas, size):
        members = [seats[rank % replicas] for rank in cell.near]
        assert members == [Seat(len(members), number) for number in range(len(members))]


def test_the_slowest_probe_counts_where_no_bandwidth_is_given(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    placement = Placement.straight(3, (1, 1, 1))
    cluster = ClusterConfig(
        sites=[SiteConfig(name=name, ranks=1) for name in "abc"],
        links=[LinkConfig(sites=["c", "b"], bandwidth_mbps=100), LinkConfig(sites=["a", "b"], latency_ms=3)],
    )
    profiles = {
        hop: LinkProfile(rtt_s=0.02, rates_bps=((1, 1e6), (8, rate)))
        for hop, rate in {(0, 2): 9e6, (1, 3): 7e6, (2, 0): 5e6, (2, 4): 1e6}.items()
    }
    costs = with_probed_links(CostModel.unit(3), cluster, placement, profiles)
    assert costs.link(0, 1).bandwidth_bps == 7e6
    assert costs.link(0, 1).latency_s == pytest.approx(0.01)
    assert costs.link(1, 0).bandwidth_bps == 5e6
    assert costs.link(1, 2) == costs.wan, "the configuration's figure stays"
