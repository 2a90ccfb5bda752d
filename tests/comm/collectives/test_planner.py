"""The planner uses the axes that it may, and remembers why."""

import pytest

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import AlphaBeta, Collective, CollectiveCosts, LinkClass, Primitive, plain
from weft.comm.collectives.space import Planner
from weft.conf.schema import Partition

COSTS = CollectiveCosts.of_links({LinkClass.intra: AlphaBeta(0.0, 1e-9), LinkClass.inter: AlphaBeta(1e-6, 2e-9)})
WISH = Collective.flat(Primitive.all_gather, regular(2, 2), num_elements=2**20, itemsize=4)


@pytest.mark.parametrize(
    ("partition", "axes", "chunked"),
    [
        (Partition.none, 1, False),
        (Partition.primitive, 1, False),
        (Partition.group, 2, False),
        (Partition.workload, 2, True),
    ],
)
def test_each_axis_comes_with_those_before_it(partition, axes, chunked):
    planner = Planner(COSTS, partition)
    rewrite = planner(WISH)
    assert len(rewrite.mesh.shape) == axes
    assert (len(rewrite.granularity) > 1) == chunked
    assert planner.choices[WISH].rewrite is rewrite is planner(WISH)


def test_without_costs_collectives_stay_as_they_are():
    planner = Planner(None)
    assert planner(WISH) == plain(WISH)
    assert "costs are unknown" in planner.choices[WISH].reason
