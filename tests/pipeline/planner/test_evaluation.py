"""Tests of layouts' limits and scores, in figures: GPUs, memory, prices and links at both sides of each limit."""

from dataclasses import replace

import pytest

from tests.pipeline.planner.planned import cluster, model, site, sums
from weft.pipeline.planner.bounds import Bounds
from weft.pipeline.planner.candidates import STARTING
from weft.pipeline.planner.estimates import Estimates, reduced_bytes
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import Shape
from weft.pipeline.planner.request import FREE, Objective, Request
from weft.pipeline.planner.routes import Route

REQUEST = Request(sequences=32)
ONE_CELL = {"cell": 1, "schedule": "auto"}
TWO = cluster(site("a", price=2.0), site("b", price=3.0), bandwidth_bps=1e10)
SHAPE = Shape(num_stages=2, replicas=4, microbatches=8)
WORK = model()
TOKENS = 4 * 8 * 1024
HOP_PRICE = 2 * 0.02 * WORK.message_bytes * 32 / 1e9
"""Price of a step's bytes over one hop of all pipelines."""
REDUCED_PRICE = 0.02 * reduced_bytes(SHAPE) * WORK.parameters / 1e9
"""Price of what replicas at two sites exchange in a step."""


def evaluation(some=TWO, work=WORK, **request):
    return Evaluation(some, work, replace(REQUEST, **request))


def bounds(some=TWO, work=WORK):
    return Bounds(Estimates(some, work))


def why_not(found):
    return found.refused.explained().partition(":")[0]


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        (SHAPE, True),
        (replace(SHAPE, num_stages=4), True),  # two ranks at each site
        (replace(SHAPE, num_stages=5), False),
        (replace(SHAPE, replicas=8, routes=2), True),  # each route has a site of two ranks
        (replace(SHAPE, num_stages=3, replicas=8, routes=2), False),
        (replace(SHAPE, replicas=1, tensor=8), True),  # a rank is two hosts
        (replace(SHAPE, replicas=1, num_stages=3, tensor=8), False),
    ],
)
def test_a_shape_takes_as_many_ranks_as_fit_its_sites(shape, fits):
    found = evaluation()
    assert (found.shape_bound(shape) is not None) == fits
    assert fits or why_not(found) == "GPUs"


@pytest.mark.parametrize("sites", [TWO, cluster(site("a"), site("b", gpu="A40", hosts=0))])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shape_fits_the_largest_gpus_if_any_of_its_cuts_does(sites, stages, checkpointing):
    """Each rank holds its layers, the first one embeddings and the last one the head."""
    shape = Shape(num_stages=stages, replicas=2, microbatches=8, microbatch_size=2, checkpointing=checkpointing)
    estimates = Estimates(sites, WORK)

    def needs(counts):
        for rank, count in enumerate(counts):
            part = estimates.rank_work(range(count), first=rank == 0, last=rank == stages - 1)
            yield estimates.memory(part, count, shape, estimates.activation_bytes(part, count, shape)).total

    share = min(max(needs(counts)) for counts in sums(8, stages)) / sites.sites[0].gpu.memory_bytes
    assert evaluation(sites, max_memory=share * 1.0001).shape_bound(shape) is not None
    little = evaluation(sites, max_memory=share * 0.9999)
    assert little.shape_bound(shape) is None and why_not(little) == "memory"
    assert not list(little.candidates(shape, Route((0,), (stages,)), sums(8, stages)))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_layer_that_fits_no_rank_fits_no_shape(place):
    """Two small layers and a large one have the memory that three ranks have together, and none has that of one."""
    shape, small = Shape(num_stages=3, replicas=1, microbatches=8, zero_stage=0), model(layers=3)
    layers = [
        replace(layer, parameters=(10 if at == place else 1) * 10**8, trained_parameters=None)
        for at, layer in enumerate(small.layers)
    ]
    work = replace(small, layers=tuple(layers))
    need = Estimates(TWO, work).memory(layers[place], 1, shape).total
    little = evaluation(work=work, max_memory=0.95 * need / TWO.sites[0].gpu.memory_bytes)
    assert little.shape_bound(shape) is None and why_not(little) == "memory"
    assert evaluation(work=work, max_memory=2 * need / TWO.sites[0].gpu.memory_bytes).shape_bound(shape) is not None


def test_a_shape_costs_at_least_what_its_gpus_do_where_they_are_cheapest():
    assert evaluation(max_cost_per_hour=8 * 2.0).shape_bound(SHAPE) is not None
    dear = evaluation(max_cost_per_hour=8 * 2.0 - 1e-6)
    assert dear.shape_bound(SHAPE) is None and why_not(dear) == "--max-cost-per-hour"
    assert "the cheapest 16 an hour" in dear.refused.explained()
    # A site that is too small for a rank of all replicas does not count.
    far = cluster(site("a", price=2.0), site("small", price=0.1, hosts=1, gpus_per_host=2))
    assert evaluation(far, max_cost_per_hour=15.9).shape_bound(SHAPE) is None


@pytest.mark.parametrize(
    ("shape", "objective", "score"),
    [
        (SHAPE, Objective.throughput, lambda step_s: step_s / TOKENS),
        (SHAPE, Objective.time_to_tokens, lambda step_s: step_s / TOKENS),
        (SHAPE, Objective.latency, lambda step_s: step_s),
        (SHAPE, Objective.cost, lambda step_s: (8 * 2.0 + FREE) * step_s / 3600 / TOKENS),
    ],
)
def test_a_shape_scores_what_its_bound_is_worth(shape, objective, score):
    step_s = bounds().step_s(shape)
    assert evaluation(objective=objective).shape_bound(shape) == pytest.approx(score(step_s), rel=1e-12)


def test_work_that_cannot_all_be_at_the_cheapest_site_costs_more():
    """Fast GPUs cost more an hour by more than they are faster, so the work costs least on the slow ones."""
    some = cluster(site("slow", price=1.0), site("fast", gpu="H100", price=9.0), bandwidth_bps=1e11, latency_s=0.0)
    found, limits = evaluation(some, objective=Objective.cost), bounds(some)
    step_s, work = limits.step_s(SHAPE), limits.price_seconds(SHAPE)
    assert work / step_s > 8 * 1.0, "the fast ones do most of it"
    assert found.shape_bound(SHAPE) == pytest.approx((work + FREE * step_s) / 3600 / TOKENS, rel=1e-12)
    part = Route((1,), (1,))
    step_s, work = limits.step_s(SHAPE, part), limits.price_seconds(SHAPE, part)
    an_hour = max(work / step_s, 4 * (1.0 + 9.0))
    paid = (an_hour + FREE) * step_s / 3600 + HOP_PRICE
    assert found.route_bound(SHAPE, part) == pytest.approx(paid / TOKENS, rel=1e-12)


def test_what_no_links_suffice_for_is_refused():
    alone = replace(TWO, links={})
    found = evaluation(alone)
    assert found.shape_bound(replace(SHAPE, num_stages=4)) is None and why_not(found) == "links"
    assert found.route_bound(SHAPE, Route((0,), (1,))) is None
    apart = evaluation(alone)
    assert apart.route_bound(replace(SHAPE, routes=2), Route((0, 1), (2, 2))) is None and why_not(apart) == "links"


@pytest.mark.parametrize(
    ("route", "shape", "an_hour"),
    [
        (Route((0,), (1,)), SHAPE, 4 * (2.0 + 2.0)),
        (Route((1,), (1,)), SHAPE, 4 * (3.0 + 2.0)),
        (Route((1,), (2,)), SHAPE, 4 * (3.0 + 3.0)),
        (Route((0, 1), (1, 1)), SHAPE, 4 * (2.0 + 3.0)),
        (Route((1,), (1,)), replace(SHAPE, replicas=2, tensor=2), 4 * (3.0 + 2.0)),
        (Route((1,), (2,)), replace(SHAPE, routes=2), 2 * (2 * 3.0 + 2 * 2.0)),
        (Route((0, 1), (2, 2)), replace(SHAPE, routes=2), 2 * (2 * 2.0 + 2 * 3.0)),
    ],
)
def test_a_route_costs_what_its_sites_do_and_the_rest_the_least(route, shape, an_hour):
    assert evaluation(max_cost_per_hour=an_hour).route_bound(shape, route) is not None
    dear = evaluation(max_cost_per_hour=an_hour - 1e-6)
    assert dear.route_bound(shape, route) is None
    assert f"the cheapest {an_hour:.4g} an hour" in dear.refused.explained()
    if route.is_whole(shape):
        assert any(evaluation(max_cost_per_hour=an_hour).candidates(shape, route))
        dear = evaluation(max_cost_per_hour=an_hour - 1e-6)
        assert not any(dear.candidates(shape, route)) and why_not(dear) == "--max-cost-per-hour"
    step_s = bounds().step_s(shape, route) + bounds().further_across_s(shape, route)
    egress = HOP_PRICE * shape.sequences / 32 if shape.routes == 1 else REDUCED_PRICE
    egress = 0.0 if route.is_whole(shape) and len(route.sites) == 1 else egress
    found = evaluation(objective=Objective.cost).route_bound(shape, route)
    tokens = shape.sequences * 1024
    assert found == pytest.approx(((an_hour + FREE) * step_s / 3600 + egress) / tokens, rel=1e-9)


def test_effort_grows_with_all_that_is_scheduled():
    def actions(count, **more):
        shape = replace(SHAPE, replicas=2, microbatches=count, **more)
        route = Route((0, 1), (1, 1)) if shape.routes == 1 else Route((0, 1), (2, 2))
        one = next(evaluation(sequences=2 * count, pins=ONE_CELL).candidates(shape, route))
        return one.actions - STARTING

    assert actions(8) == 3 * 2 * 8
    assert actions(32) == 3 * 2 * 32 == actions(1000), "what repeats itself is counted on"
    assert actions(8, routes=2) == 2 * actions(8)
    assert actions(8, arrangement="site_fold") == 2 * actions(8)


def test_other_schedules_than_auto_have_neither_cells_nor_folds():
    for pins, shape in [({"cell": 2}, SHAPE), ({"cell": 1}, replace(SHAPE, arrangement="site_fold"))]:
        route = Route((0, 1), (1, 1))
        assert list(evaluation(pins=pins).candidates(shape, route))
        assert not list(evaluation(pins=pins | {"schedule": "1f1b"}).candidates(shape, route))


def test_folds_within_sites_lie_alike_on_all_routes():
    four = cluster(*(site(name, hosts=1, gpus_per_host=2) for name in "abcd"), bandwidth_bps=1e11)
    shape = Shape(num_stages=2, replicas=2, microbatches=4, routes=2, arrangement="site_fold")
    assert list(evaluation(four, sequences=8).candidates(shape, Route((0, 1, 2, 3), (1, 1, 1, 1))))
    assert not list(evaluation(four, sequences=8).candidates(shape, Route((0, 1, 2), (1, 1, 2))))
    straight = replace(shape, arrangement="straight")
    assert list(evaluation(four, sequences=8).candidates(straight, Route((0, 1, 2), (1, 1, 2))))


@pytest.mark.parametrize("route", [Route((0,), (2,)), Route((0, 1), (1, 1))])
def test_a_prediction_in_figures(route):
    found = evaluation(pins=ONE_CELL)
    one = next(found.candidates(SHAPE, route))
    told, (costs,) = found.schedule(one), one.costs
    prices, hops = [2.0, 3.0], len(route.sites) - 1
    gpu = TWO.sites[0].gpu
    assert told.step_s == max(told.bound_s, told.pipeline_s + told.collective_s + told.optimizer_s)
    assert told.busy_s == pytest.approx(8 * sum(stage.compute_s for stage in costs.stages) / 2)
    assert told.tokens == TOKENS
    flops = 3 * WORK.whole.forward_flops / 1024 * TOKENS
    assert told.mfu == pytest.approx(flops / (told.step_s * 8 * gpu.flops_per_s))
    assert told.price_per_hour == 4 * sum(
        prices[number] * held for number, held in zip(route.sites, route.stages, strict=True)
    )
    sent = 2 * WORK.message_bytes * 32 * hops
    assert (told.wan_bytes, told.egress_per_step) == pytest.approx((sent, sent / 1e9 * 0.02))
    assert told.memory.total / gpu.memory_bytes == told.memory_share <= REQUEST.max_memory
    totals = [replace(state, activations=told.memory.activations).total for state in one.states]
    assert told.memory.total in totals
    assert told.cap_bytes == max(min(one.rooms), *(stage.activation_bytes for stage in costs.stages))
    assert told.cost_per_step == pytest.approx(told.price_per_hour * told.step_s / 3600 + told.egress_per_step)


def bound_by(some, shape=SHAPE, route=None, work=WORK):
    found = Evaluation(some, work, replace(REQUEST, pins=ONE_CELL, sequences=shape.sequences))
    route = route or Route(tuple(range(len(some.sites))), (1,) * len(some.sites))
    one = next(found.candidates(shape, route))
    told = found.schedule(one)
    return told, one, told.binds


def test_what_holds_a_layout_up_is_named_with_its_share():
    two = [site("a", price=2.0), site("b", price=3.0)]
    fast = cluster(*two, bandwidth_bps=1e13, latency_s=0.0)
    told, one, binds = bound_by(fast)
    busiest_s = 8 * max(stage.compute_s for stage in one.costs[0].stages)
    assert binds == f"compute ({busiest_s / told.step_s:.0%} of the step)"
    narrow = cluster(*two, bandwidth_bps=1e8, latency_s=0.0)
    told, one, binds = bound_by(narrow)
    link = one.costs[0].wan_links[0][1]
    held_s = 8 * link.occupancy_s(WORK.message_bytes)
    assert binds in [f"uplink {way} ({held_s / told.step_s:.0%} of the step)" for way in ("a to b", "b to a")]
    far = cluster(*two, bandwidth_bps=1e13, latency_s=50.0)
    told, one, binds = bound_by(far)
    assert binds == f"the way through sites ({100.0 / told.step_s:.0%} of the step)"
    told, one, binds = bound_by(
        cluster(site("a", hosts=4)), Shape(num_stages=4, replicas=1, microbatches=1), Route((0,), (4,))
    )
    busy = [stage.compute_s for stage in one.costs[0].stages]
    assert binds == f"filling and draining the pipeline ({(sum(busy) - max(busy)) / told.step_s:.0%} of the step)"
    slow = cluster(replace(two[0], network_bps=1e8))
    told, one, binds = bound_by(slow, Shape(num_stages=1, replicas=8, microbatches=4), Route((0,), (1,)))
    assert binds == f"collectives over replicas ({one.collective_s / told.step_s:.0%} of the step)"
    apart = cluster(*two, bandwidth_bps=1e8, latency_s=0.0)
    told, one, binds = bound_by(apart, replace(SHAPE, routes=2), Route((0, 1), (2, 2)))
    assert binds == f"collectives over replicas at several sites ({one.collective_s / told.step_s:.0%} of the step)"
    assert told.wan_bytes == reduced_bytes(SHAPE) * WORK.parameters


def test_a_cell_is_on_its_way_for_its_share_of_a_transfer():
    """With the same delay all pipelines wait as long, and each micro-batch leaves over both uplinks."""
    some = cluster(site("a"), site("b"), bandwidth_bps=3e7, latency_s=50.0)
    found = evaluation(some, pins={"cell": 2, "schedule": "auto"})
    one = next(found.candidates(SHAPE, Route((0, 1), (1, 1))))
    told, link = found.schedule(one), one.costs[0].wan_links[0][1]
    way_s = 2 * (50.0 + link.transit_s(WORK.message_bytes) / 2)
    assert link.transit_s(WORK.message_bytes) > 5.0
    assert told.binds == f"the way through sites ({way_s / told.step_s:.0%} of the step)"
