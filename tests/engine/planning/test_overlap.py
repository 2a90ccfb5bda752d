"""The overlap plan of a pipeline's collectives: what it does when links are slow, fast, or free."""

import pytest

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass, Primitive
from weft.engine.planning.overlap import ZeroWork, plan_overlap, with_collectives
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate

STAGE = StageCost(forward_s=0.01, input_s=0.01, weight_s=0.01, activation_bytes=100.0)
GROUP = regular(2, 2)
PLACEMENT = Placement.interleaved(1, 4)
COSTS = CostModel(stages=(STAGE,) * 4)


def links(bytes_per_s):
    return CollectiveCosts.of_links(
        {LinkClass.intra: AlphaBeta(1e-6, 1e-12), LinkClass.inter: AlphaBeta(1e-5, 1 / bytes_per_s)}
    )


def plan(bytes_per_s=25e6, zero_stage=1, microbatches=8, memory=float("inf")):
    work = ZeroWork(
        zero_stage=zero_stage,
        group=GROUP,
        costs=links(bytes_per_s),
        elements=(10**6 + 1,) * 4,
        memory_bytes=memory,
    )
    return plan_overlap(work, COSTS, PLACEMENT, microbatches)


def test_slow_links_between_nodes_are_spared_and_covered():
    found = plan()
    plans = found.stages
    for each in plans:
        assert len(each.reduce.choice.rewrite.mesh.shape) == 2
        assert each.reduce.choice.rewrite.collective.primitive is Primitive.reduce_scatter
    assert len(plans[0].reduce.chunks.granularity) > 1  # nothing follows to hide it
    assert found.together > 1
    assert any("T2" in line for each in plans for line in each.lines())


def test_fast_links_need_no_partition_and_no_more_micro_batches():
    found = plan(bytes_per_s=1e12)
    assert all(each.gather.chunks.granularity == (1.0,) for each in found.stages[1:])
    assert found.together == 1


def test_without_shards_gradients_are_all_reduced_and_weights_stay():
    for each in plan(zero_stage=0).stages:
        assert each.reduce.choice.rewrite.collective.primitive is Primitive.all_reduce
        assert each.gather.choice.cost_s == 0
        assert not any("weights:" in line for line in each.lines())


def test_memory_limits_what_is_launched_together():
    assert plan(memory=4 * 200.0).together == 2
    with pytest.raises(ValueError, match="not even one fits"):
        plan(memory=4 * 50.0)


def test_the_simulator_sees_the_collectives():
    costs = with_collectives(COSTS, plan())
    schedule = lower(generate("interleaved", PLACEMENT, 8))
    assert simulate(schedule, costs).step_s > simulate(schedule, COSTS).step_s
