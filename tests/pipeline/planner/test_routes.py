"""Replicas that go through sites of their own: when they are best, what they cost, and what bounds them."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, model, site
from tests.pipeline.planner.test_search import REQUEST, planned, uneven_clusters, ways
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Objective
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.search import plan
from weft.pipeline.planner.shapes import shapes

SHAPE = Shape(num_stages=2, replicas=4, microbatches=8, routes=2)


def costed(some, shape, route, **request):
    """The one candidate of a route, and what is predicted of it."""
    evaluation = Evaluation(some, model(), replace(REQUEST, **request))
    (candidate,) = evaluation.candidates(shape, route)
    return candidate, evaluation.schedule(candidate)


def test_three_sites_that_hold_a_small_model_train_replicas_of_their_own():
    """What replicas exchange once a step is less than what pipelines exchange for every micro-batch."""
    three = cluster(*(site(name, hosts=1, gpus_per_host=4) for name in "abc"), bandwidth_bps=2e10, latency_s=0.02)
    request = replace(REQUEST, sequences=3 * 512)
    work = model(layers=4, parameters=20_000_000)
    found = plan(three, work, request)
    assert found.best.layout.routes == 3 and sorted(found.best.layout.sites) == [0, 1, 2]
    assert found.best.step_s < plan(three, work, replace(request, pins={"routes": 1})).best.step_s
    assert found.alone is not None and found.alone.layout.routes == 1
    slow = cluster(*three.sites, bandwidth_bps=1e7, latency_s=0.02)
    assert plan(slow, work, request).best.layout.routes == 1


def test_a_pipeline_over_two_sites_and_whole_ones_at_a_third_use_all_gpus():
    some = cluster(
        site("a", hosts=1, gpus_per_host=1),
        site("b", hosts=1, gpus_per_host=1),
        site("c", hosts=1, gpus_per_host=2),
        bandwidth_bps=1e11,
        latency_s=0.001,
    )
    request = replace(REQUEST, sequences=512, pins={"num_stages": 2})
    best = plan(some, model(), request).best
    assert best.layout.routes == 2 and best.layout.gpus == 4
    assert {way.sites for way in best.layout.ways} in ({(0, 1), (2,)}, {(1, 0), (2,)})


@pytest.mark.parametrize("routes", [2, 3])
def test_what_replicas_reduce_over_the_wan_is_counted_in_time_bytes_and_money(routes):
    sites = [site(name, hosts=1, gpus_per_host=4, price=0.0) for name in "abc"[:routes]]
    some = cluster(*sites, bandwidth_bps=1e9, latency_s=0.01)
    shape = replace(SHAPE, replicas=2 * routes, routes=routes)
    _, found = costed(some, shape, Route(tuple(range(routes)), (2,) * routes))
    alone, _ = costed(cluster(sites[0]), replace(SHAPE, replicas=2, routes=1), Route((0,), (2,)))
    layers, outside = 8 * 200_000_000, 2 * 100_000_000
    sent = 6.0 * (layers + outside) * (routes - 1)  # fp32 gradients and bf16 weights, of each site what it has not
    assert found.wan_bytes == pytest.approx(sent)
    assert found.egress_per_step == pytest.approx(sent / 1e9 * 0.02)
    # Half of the model is a rank's, two GPUs share it, and four share a host's uplink.
    uplink_s = (routes - 1) / routes * 6.0 * (layers + outside) / 2 / 2 * 8 / (1e9 / 4)
    assert found.collective_s == pytest.approx(alone.collective_s + uplink_s + 2 * 0.01, rel=1e-6)


def test_replicas_that_lie_apart_hold_the_same_layers_and_wait_for_the_slower():
    fast, slow = site("fast", hosts=1, gpu="H100"), site("slow", hosts=1, gpu="A100")
    some = cluster(fast, slow, bandwidth_bps=1e12, latency_s=0.0)
    _, found = costed(some, SHAPE, Route((0, 1), (2, 2)))
    _, alone = costed(cluster(slow), replace(SHAPE, replicas=2, routes=1), Route((0,), (2,)))
    assert found.pipeline_s == pytest.approx(alone.pipeline_s)


@given(uneven_clusters(), st.sampled_from(Objective), st.sampled_from([1, 4]))
@settings(max_examples=10, deadline=None)
def test_bounds_are_below_what_they_bound(some, objective, experts):
    work = model(experts=8 if experts > 1 else 0)
    request = replace(REQUEST, objective=objective, sequences=48)
    evaluation = Evaluation(some, work, request)
    for shape in islice((shape for shape in shapes(some, work, request) if shape.routes > 1), 0, None, 3):
        bound = max(evaluation.shape_bound(shape) or 0.0, evaluation.across_bound(shape))
        for route in islice(ways(some, shape), 20):
            parts = [Route(route.sites[:place], route.stages[:place]) for place in range(1, len(route.sites) + 1)]
            for candidate in evaluation.candidates(shape, route):
                above = candidate.score_bound * (1 + 1e-9)
                assert bound <= above
                assert all(evaluation.route_bound(shape, part) <= above for part in parts)


@given(uneven_clusters())
@settings(max_examples=8, deadline=None)
def test_the_search_finds_the_best_of_all_sets_of_routes(some):
    request = replace(REQUEST, sequences=24, pins={"tensor": 1, "microbatch_size": 1, "num_stages": 2})
    if (found := planned(some, request)) is None:
        return
    evaluation = Evaluation(some, model(), request)
    for shape in shapes(some, model(), request):
        for route in ways(some, shape) if shape.routes > 1 else ():
            for candidate in evaluation.candidates(shape, route):
                if one := evaluation.schedule(candidate):
                    assert request.score(one) >= request.score(found.best) * (1 - found.gap) * (1 - 1e-9)


def test_sites_whose_replicas_reduce_have_links():
    three = cluster(*(site(name, hosts=1, gpus_per_host=4) for name in "abc"), bandwidth_bps=2e10)
    some = replace(three, links={pair: link for pair, link in three.links.items() if pair != (0, 2)})
    request = replace(REQUEST, sequences=48, pins={"routes": 3})
    with pytest.raises(ValueError, match="links: sites with enough GPUs are not neighbours"):
        plan(some, model(), request)


def test_weights_that_are_gathered_for_every_micro_batch_stay_in_a_site():
    some = cluster(site("a"), site("b"))
    with pytest.raises(ValueError, match=r"no layout|--pin"):
        plan(some, model(), replace(REQUEST, pins={"routes": 2, "zero_stage": 3}))
