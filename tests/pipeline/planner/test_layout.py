"""A layout's ranks, routes, links and cells by hand, and what follows from a prediction."""

from dataclasses import replace

import pytest

from weft.pipeline.memory import RankMemory, ZeroMemory
from weft.pipeline.placement import Placement
from weft.pipeline.planner.layout import LEGS, Layout, Prediction, Shape

SHAPE = Shape(num_stages=3, replicas=4, tensor=2, context=3, microbatches=5, microbatch_size=7, routes=2)
LAYOUT = Layout(**vars(SHAPE), sites=(4, 1, 2), stages=(2, 1, 3), layers=(2, 3, 1))


def test_a_shape_counts_gpus_pipelines_and_sequences():
    assert (SHAPE.gpus_per_rank, SHAPE.lines, SHAPE.gpus, SHAPE.sequences) == (6, 24, 72, 140)
    assert (SHAPE.replicas_of_route, SHAPE.lines_of_route) == (2, 12)
    assert {name: replace(SHAPE, arrangement=name).virtual_stages for name in LEGS} == {
        "straight": 3,
        "fold": 6,
        "site_fold": 6,
        "site_interleaved": 6,
    }
    assert {name: replace(SHAPE, arrangement=name).crossings for name in LEGS} == {
        "straight": 1,
        "fold": 2,
        "site_fold": 1,
        "site_interleaved": 1,
    }


def test_replicas_may_pool_where_they_share_nothing_else():
    alone = Shape(num_stages=2, replicas=4, microbatches=4)
    assert alone.may_pool and replace(alone, checkpointing=True, zero_stage=3).may_pool
    for more in ({"tensor": 2}, {"context": 2}, {"expert": 2}, {"routes": 2}):
        assert not replace(alone, **more).may_pool


def test_each_route_sees_its_own_sites():
    assert [(way.sites, way.stages) for way in LAYOUT.ways] == [((4, 1), (2, 1)), ((2,), (3,))]
    assert all(replace(way, sites=LAYOUT.sites, stages=LAYOUT.stages) == LAYOUT for way in LAYOUT.ways)
    assert LAYOUT.site_of() == [4, 4, 1, 2, 2, 2]
    # Hops of pipelines, and between replicas of each pipeline rank; each pair once.
    assert {frozenset(pair) for pair in LAYOUT.links} == {frozenset({4, 1}), frozenset({4, 2}), frozenset({1, 2})}
    assert len(LAYOUT.links) == 3
    alone = replace(LAYOUT, routes=1, sites=(4, 1), stages=(2, 1))
    assert alone.links == [(4, 1)]


def test_a_placement_is_that_of_the_route_through_most_sites():
    assert LAYOUT.placement == Placement.named("straight", 3, (2, 1))
    turned = replace(LAYOUT, sites=(2, 4, 1), stages=(3, 2, 1))
    assert turned.placement == LAYOUT.placement
    assert replace(LAYOUT, cell=2).placement == replace(LAYOUT.placement, pipelines=2)


@pytest.mark.parametrize(
    ("replicas", "cell", "sizes"), [(4, 1, [1]), (4, 2, [2]), (5, 2, [2, 1]), (8, 5, [5, 3]), (3, 3, [3])]
)
def test_the_last_cell_holds_what_replicas_are_left(replicas, cell, sizes):
    layout = Layout(num_stages=2, replicas=replicas, microbatches=4, sites=(0,), stages=(2,), layers=(1, 1), cell=cell)
    assert [one.pipelines for one in layout.cells] == sizes


def test_what_follows_from_a_prediction():
    states = ZeroMemory(weights=1.0, gradients=0.0, optimizer=0.0, buffers=0.0)
    told = Prediction(
        layout=LAYOUT,
        step_s=4.0,
        bound_s=3.5,
        pipeline_s=3.6,
        collective_s=0.2,
        optimizer_s=0.2,
        busy_s=3.0,
        tokens=8000,
        mfu=0.4,
        memory=RankMemory(zero=states, activations=1.0),
        memory_share=0.5,
        cap_bytes=9.0,
        wan_bytes=0.0,
        price_per_hour=90.0,
        egress_per_step=0.05,
        binds="compute",
    )
    assert told.tokens_per_s == 2000.0
    assert told.bubble_share == 0.25
    assert told.cost_per_step == pytest.approx(0.15)
    assert told.hours(7.2e9) == pytest.approx(1000.0)
    assert told.cost(8e6) == pytest.approx(150.0)
    assert replace(told, busy_s=4.5).bubble_share == 0.0
