"""Replicas that go through sites of their own: when they are best, what they cost, and what bounds them."""

from dataclasses import replace
from functools import cache, partial
from itertools import islice, pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, model, site, sums
from tests.pipeline.planner.test_search import REQUEST, planned, uneven_clusters, ways
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import Objective
from weft.pipeline.planner.routes import Route, Routes
from weft.pipeline.planner.search import plan
from weft.pipeline.planner.shapes import shapes, site_capacity

SHAPE = Shape(num_stages=2, replicas=4, microbatches=8, routes=2)


def costed(some, shape, route, **request):
    """The one candidate of a route, and what is predicted of it."""
    evaluation = Evaluation(some, model(), replace(REQUEST, **request))
    candidate = next(evaluation.candidates(shape, route))
    return candidate, evaluation.schedule(candidate)


def test_three_sites_that_hold_a_small_model_train_replicas_of_their_own():
    """Replicas exchange less once a step than pipelines for every micro-batch."""
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
        bound, bound_of = evaluation.shape_bound(shape) or 0.0, cache(partial(evaluation.route_bound, shape))
        for route in islice(ways(some, shape), 20):
            parts = [Route(route.sites[:place], route.stages[:place]) for place in range(1, len(route.sites) + 1)]
            scores = [candidate.score_bound for candidate in evaluation.candidates(shape, route)]
            if scores:
                assert max(bound, *map(bound_of, parts)) <= min(scores) * (1 + 1e-9)


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
                    assert request.score(one) >= request.score(found.best) / (1 + found.gap) * (1 - 1e-9)


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


def all_routes(some, shape, request, found=None):
    """Whole routes, a site at a time."""
    for further in Routes(some, request).longer(shape, found):
        if further.is_whole(shape):
            yield further
        else:
            yield from all_routes(some, shape, request, further)


def pipelines(some, shape, request):
    """Return the routes of one pipeline: every order of sites along links, with every number of ranks at each."""
    caps, numbers = site_capacity(some, shape.gpus_per_rank, shape.replicas_of_route), range(len(some.sites))
    for count in range(1, min(len(some.sites), shape.num_stages) + 1):
        for order, held in product(permutations(numbers, count), sums(shape.num_stages, count)):
            if any(part > caps[site] for site, part in zip(order, held, strict=True)):
                continue
            if any(some.link(here, there) is None for here, there in pairwise(order)):
                continue
            if request.home and not {order[0], order[-1]} <= request.home:
                continue
            if not request.max_sites or count <= request.max_sites:
                yield Route(order, held)


def prices(count):
    """All of them different, so that no site stands for another, and not in the order of the sites."""
    return [(7 * number) % 5 + 1.0 for number in range(count)]


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=5),
    st.lists(st.booleans(), min_size=10, max_size=10),
    st.integers(1, 4),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([(), (0,), (0, 1), (1, 3)]),
    st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_routes_are_all_orders_of_sites_along_links(hosts, linked, stages, most, home, routes):
    """Each set of several routes occurs once, the one that begins at the cheaper site first."""
    sites = [
        site(str(number), hosts=count, gpus_per_host=1, price=price)
        for number, (count, price) in enumerate(zip(hosts, prices(len(hosts)), strict=True))
    ]
    made = cluster(*sites)
    links = {pair: link for (pair, link), joined in zip(made.links.items(), linked, strict=False) if joined}
    some = replace(made, links=links)
    request = replace(REQUEST, objective=Objective.cost, max_sites=most, home=frozenset(home) & set(range(len(hosts))))
    shape = Shape(num_stages=stages, replicas=routes, microbatches=4, routes=routes)
    one = list(pipelines(some, shape, request))
    expected = [(route.sites, route.stages) for route in one]
    if routes == 2:
        expected = [
            (first.sites + second.sites, first.stages + second.stages)
            for first, second in permutations(one, 2)
            if not set(first.sites) & set(second.sites) and sites[first.sites[0]].price < sites[second.sites[0]].price
        ]
    found = [(route.sites, route.stages) for route in all_routes(some, shape, request)]
    assert sorted(found) == sorted(expected)


def test_of_sites_that_are_alike_the_cheapest_stands_for_all():
    some = cluster(site("a", price=3.0), site("b", price=1.0), site("c", price=2.0), bandwidth_bps=1e10)
    shape = Shape(num_stages=4, replicas=4, microbatches=4)  # two ranks at each site

    def filled(some, request, shape=shape, sites=2):
        return [route.sites for route in all_routes(some, shape, request) if len(route.sites) == sites]

    assert filled(some, REQUEST) == [(1, 2)]
    limited = replace(REQUEST, max_cost_per_hour=100.0)
    for request in (limited, replace(REQUEST, objective=Objective.cost)):
        assert len(filled(some, request)) == 6, "where money counts, prices tell them apart"
    uneven = some.with_link(0, 1, latency_s=9.0)
    assert len(filled(uneven, REQUEST)) == 6
    for change in ({"gpu": site("h", gpu="H100").gpu}, {"network_bps": 1e9}, {"hosts": 3}):
        assert (0, 1) in {route.sites for route in all_routes(some.with_site(0, **change), shape, REQUEST)}
    at_home = replace(REQUEST, home=frozenset({0, 1}))
    assert set(filled(some, at_home)) == {(1, 0)}
    # One pipeline in one site needs no link, whatever those of the others are.
    alone = replace(shape, num_stages=2)
    assert filled(uneven, REQUEST, alone, 1) == [(1,)]


def test_a_route_by_hand():
    shape = Shape(num_stages=3, replicas=2, microbatches=4, routes=2)
    route = Route((4, 1, 2, 0), (2, 1, 1, 2))
    assert route.is_whole(shape) and not Route((4, 1), (2, 1)).is_whole(shape)
    assert list(route.hops(shape)) == [(4, 1), (2, 0)]
    assert route.last(shape) == Route((2, 0), (1, 2))
    assert Route((4, 1), (2, 1)).last(shape) == Route((4, 1), (2, 1))
    assert Route((4, 1, 2), (2, 1, 1)).last(shape) == Route((2,), (1,))
    assert Route((4,), (2,)).last(shape) == Route((4,), (2,)) and Route((), ()).last(shape) == Route((), ())
