"""Folds and DP-cells in plans: where they are taken, what they send, and which of them are compared."""

from dataclasses import replace

import pytest

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.action import SENDS, Op
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.lowering import lower
from weft.pipeline.planner.branching import WORTH
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import LEGS, Shape
from weft.pipeline.planner.request import Request
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.search import plan
from weft.pipeline.planner.shapes import shapes

REQUEST = Request(sequences=32)


def test_a_fold_is_taken_where_few_micro_batches_fill_a_pipeline():
    some = cluster(site("a", hosts=2), bandwidth_bps=1e10)
    pins = {"num_stages": 4, "tensor": 1, "context": 1, "replicas": 2, "microbatch_size": 4}
    by = {
        name: plan(some, model(), replace(REQUEST, pins={**pins, "arrangement": name})).best
        for name in ("straight", "site_fold", "site_interleaved")
    }
    best = plan(some, model(), replace(REQUEST, pins=pins)).best
    assert best.layout.arrangement in ("site_fold", "site_interleaved")
    assert best.step_s <= min(by["site_fold"].step_s, by["site_interleaved"].step_s) * WORTH
    assert by["site_fold"].step_s < by["straight"].step_s
    for name, one in by.items():
        assert len(one.layout.layers) == 4 * len(LEGS[name]) and sum(one.layout.layers) == 8
        assert one.layout.sequences == REQUEST.sequences


@pytest.mark.parametrize("arrangement", LEGS)
@pytest.mark.parametrize("stages", [(2, 2), (1, 2, 1)])
def test_bytes_between_sites_are_those_of_the_schedule(arrangement, stages):
    some = cluster(*(site(f"s{number}", hosts=1, gpus_per_host=held) for number, held in enumerate(stages)))
    request = replace(REQUEST, pins={"arrangement": arrangement, "num_stages": 4, "replicas": 1, "tensor": 1})
    evaluation, work = Evaluation(some, model(), request), model()
    shape = next(one for one in shapes(some, work, request) if one.microbatches == 8 and not one.checkpointing)
    candidate = next(iter(evaluation.candidates(shape, Route(tuple(range(len(stages))), stages))))
    prediction = evaluation.schedule(candidate)
    placement, sent = prediction.layout.placement, 0.0
    (costs,) = candidate.costs
    for row in lower(generate_auto(placement, shape.microbatches, costs)).rows:
        for action in (action for slot in row for action in slot if action.op in SENDS):
            to = action.stage + (1 if action.op is Op.SEND_F else -1)
            if placement.crosses_wan(min(action.stage, to)):
                sent += costs.stages[min(action.stage, to)].output_bytes
    assert prediction.wan_bytes == pytest.approx(sent) and sent > 0


def test_a_dp_cell_of_folds_is_planned_and_may_be_best():
    """Few micro-batches fill a pipeline sooner by a fold, and replicas that pool a slow uplink cross it sooner."""
    two = cluster(site("a", hosts=2, gpus_per_host=2), site("b", hosts=2, gpus_per_host=2), bandwidth_bps=2e9)
    pins = {"num_stages": 4, "tensor": 1, "context": 1, "replicas": 2, "microbatch_size": 4, "routes": 1}

    def best(**more):
        return plan(two, model(), replace(REQUEST, pins={**pins, **more})).best

    found = best()
    assert found.layout.cell == 2 and found.step_s < best(cell=1).step_s
    folded = best(arrangement="site_fold")
    assert folded.layout.cell == 2 and found.step_s <= folded.step_s * WORTH


def test_a_fold_over_sites_is_taken_where_they_are_close():
    two = cluster(*(site(name, hosts=1, gpus_per_host=2) for name in "ab"), bandwidth_bps=1e12, latency_s=1e-6)
    pins = {"num_stages": 4, "tensor": 1, "replicas": 1, "microbatch_size": 8}
    by = {
        name: plan(two, model(), replace(REQUEST, pins={**pins, "arrangement": name})).best
        for name in ("straight", "site_fold", "fold")
    }
    best = plan(two, model(), replace(REQUEST, pins=pins)).best
    assert best.layout.arrangement == "fold" and by["fold"].wan_bytes == 2 * by["site_fold"].wan_bytes
    assert best.step_s == by["fold"].step_s < min(by["site_fold"].step_s, by["straight"].step_s)
    far = replace(two, links={pair: replace(link, latency_s=1.0) for pair, link in two.links.items()})
    assert plan(far, model(), replace(REQUEST, pins=pins)).best.layout.arrangement != "fold"


def test_in_one_site_both_folds_are_one():
    some, pins = cluster(site("a", hosts=2)), {"num_stages": 4, "tensor": 1, "replicas": 2}
    one, other = (
        plan(some, model(), replace(REQUEST, pins={**pins, "arrangement": name})).best for name in ("fold", "site_fold")
    )
    assert one.step_s == other.step_s and one.layout.placement == other.layout.placement and not one.wan_bytes


def test_cells_are_of_gpus_that_share_no_layer():
    some = cluster(site("a"), site("b"), bandwidth_bps=1e8)
    for one in plan(some, model(), replace(REQUEST, pins={"num_stages": 2})).ranked:
        assert one.layout.cell == 1 or one.layout.gpus_per_rank == one.layout.expert == 1
    found = plan(some, model(), replace(REQUEST, pins={"num_stages": 2, "cell": 2}))
    assert all(one.layout.tensor == 1 and one.layout.cell == 2 for one in found.ranked)


def test_cells_of_up_to_eight_replicas_are_compared():
    shape = Shape(num_stages=2, replicas=4, microbatches=8)

    def cells(bandwidth_bps, replicas=4, where=(0, 1), **request):
        some = cluster(site("a", hosts=4), site("b", hosts=4), latency_s=0.0, bandwidth_bps=bandwidth_bps)
        held = (1, 1) if len(where) == 2 else (2,)
        evaluation = Evaluation(some, model(), replace(REQUEST, **request))
        found = list(evaluation.candidates(replace(shape, replicas=replicas), Route(where, held)))
        return sorted({one.layout.cell for one in found})

    assert cells(1e8) == [1, 2, 3, 4]
    assert cells(1e8, replicas=1) == [1]
    assert cells(1e8, replicas=2) == [1, 2]
    assert cells(1e8, where=(0,)) == [1]
    assert cells(1e8, pins={"cell": 2}) == [2]
    assert cells(1e12, pins={"cell": 4}) == [4]
    assert cells(1e8, replicas=9) == list(range(1, 9))


def test_a_step_is_that_of_the_cell_that_takes_longest():
    some = cluster(site("a", hosts=4), site("b", hosts=4), latency_s=0.0, bandwidth_bps=1e9)
    shape = Shape(num_stages=2, replicas=3, microbatches=8)

    def pipeline_s(cell, replicas):
        evaluation = Evaluation(some, model(), replace(REQUEST, pins={"cell": cell, "schedule": "auto"}))
        (candidate,) = evaluation.candidates(replace(shape, replicas=replicas), Route((0, 1), (1, 1)), [(4, 4)])
        found = evaluation.schedule(candidate)
        assert found.step_s >= found.bound_s
        return found.pipeline_s

    both, rest = pipeline_s(2, 2), pipeline_s(1, 1)
    assert both != rest and pipeline_s(2, 3) == max(both, rest)
