"""Costs that were probed are found again."""

import pytest

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import AlphaBeta, CollectiveCosts, Group, LinkClass
from weft.comm.collectives.cache import CostCache, topology_key

COSTS = CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(1e-5, 1e-10), LinkClass.inter: AlphaBeta(1e-3, 1e-8)})


def test_what_is_written_is_read_beside_others(tmp_path):
    cache = CostCache.in_folder(str(tmp_path))
    assert cache.read("a") is None
    cache.write("a", COSTS)
    cache.write("b", CollectiveCosts({}))
    assert cache.read("a") == COSTS
    assert cache.read("b") == CollectiveCosts({})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', '{"a": [{"link": "none"}]}'])
def test_a_file_that_is_not_readable_is_no_costs(tmp_path, text):
    cache = CostCache.in_folder(str(tmp_path))
    cache.path.write_text(text)
    assert cache.read("a") is None
    cache.write("a", COSTS)
    assert cache.read("a") == COSTS


def test_the_key_names_the_topology_and_not_the_ranks():
    one, other = Group((0, 1, 2, 3), (0, 0, 1, 1)), Group((4, 5, 8, 9), (2, 2, 7, 7))
    assert topology_key(one, "cpu") == topology_key(other, "cpu")
    assert topology_key(one, "cpu") != topology_key(one, "cuda")
    assert topology_key(one, "cpu") != topology_key(regular(4, 1), "cpu")
    assert topology_key(one, "cpu") != topology_key(Group(one.ranks, one.nodes, at_sites=True), "cpu")
    assert "2+2 ranks" in topology_key(one, "cpu") and "at sites" not in topology_key(one, "cpu")
