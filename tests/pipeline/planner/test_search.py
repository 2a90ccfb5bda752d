"""Plans are as good as they say: they fit, more never hurts, and what is alike is treated alike."""

from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.planner.planned import cluster, model, site
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.planner.branching import WORTH
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.evaluation import Evaluation
from weft.pipeline.planner.layout import LEGS
from weft.pipeline.planner.request import EQUAL, Objective, Request
from weft.pipeline.planner.routes import Route, Routes
from weft.pipeline.planner.search import plan
from weft.pipeline.planner.shapes import shapes, site_capacity
from weft.pipeline.validation import validate

ANOMALY = 1.02
"""List schedules of one layout may get a little longer when a link gets faster (Graham 1969)."""
KINDS = st.sampled_from(["A100", "H100", "A40"])
REQUEST = Request(sequences=32)
FOLDED_CELL = {"cell": 2, "arrangement": "site_fold", "tensor": 1}


@st.composite
def clusters(draw):
    sites = [
        site(
            f"s{number}", hosts=draw(st.integers(1, 3)), gpus_per_host=draw(st.sampled_from([1, 2, 4])), gpu=draw(KINDS)
        )
        for number in range(draw(st.integers(1, 3)))
    ]
    return cluster(*sites, latency_s=draw(st.floats(0, 0.05)), bandwidth_bps=draw(st.floats(1e9, 5e10)))


@st.composite
def uneven_clusters(draw):
    """With links of their own between sites, some of them slow for a pair of hosts, and some slow networks inside."""
    some = draw(clusters())
    links = {
        pair: replace(link, latency_s=draw(st.sampled_from([0.0, 0.02])), pair_bps=draw(st.sampled_from([3e8, 1e12])))
        for pair, link in some.links.items()
    }
    networks = st.sampled_from([1e9, 400e9])
    return replace(some, links=links, sites=tuple(replace(one, network_bps=draw(networks)) for one in some.sites))


def planned(some_cluster, request=REQUEST, work=None):
    try:
        return plan(some_cluster, work or model(), request)
    except ValueError:
        return None


def test_a_search_without_a_plan_ends_and_claims_no_proof(monkeypatch):
    some_cluster = cluster(site("a", hosts=2), site("b", hosts=2))
    with pytest.raises(ValueError, match=r"^memory: the model does not fit"):
        plan(some_cluster, model(), replace(REQUEST, max_memory=1e-6))
    monkeypatch.setattr("weft.pipeline.planner.branching.WITHOUT_PLAN", 0)
    with pytest.raises(ValueError, match="no plan found, and the search ended before it had compared all layouts"):
        plan(some_cluster, model(), REQUEST)


@given(clusters(), st.sampled_from(Objective))
@settings(max_examples=20, deadline=None)
def test_a_plan_fits_and_runs(some, objective):
    request = replace(REQUEST, objective=objective)
    if (found := planned(some, request)) is None:
        return
    scores = [request.score(one) for one in found.ranked]
    assert all(one <= other * (1 + EQUAL) for one, other in pairwise(scores))
    for one in found.ranked:
        layout = one.layout
        assert layout.sequences == REQUEST.sequences and sum(layout.layers) == 8 and min(layout.layers) > 0
        assert one.memory_share <= REQUEST.max_memory
        assert one.step_s >= one.bound_s and 0 < one.mfu <= some.efficiency
        for number, held in zip(layout.sites, layout.stages, strict=True):
            assert held * layout.replicas_of_route <= some.sites[number].units(layout.gpus_per_rank)
        assert len(layout.ways) == layout.routes and len(set(layout.sites)) == len(layout.sites)
        assert all(sum(way.stages) == layout.num_stages for way in layout.ways)
        assert all(some.link(here, there) is not None for here, there in layout.links)
    layout = found.best.layout
    for one in (layout, *(one.layout for one in found.ranked if len(one.layout.legs) > 1)):
        costs = Estimates(some, model()).costs(max(one.ways, key=lambda way: len(way.sites)))
        validate(generate_auto(one.placement.single, min(one.microbatches, 8), costs))


def ways(some, shape, route=None):
    for further in Routes(some, REQUEST).longer(shape, route):
        if further.is_whole(shape):
            yield further
        else:
            yield from ways(some, shape, further)


def adapted(work):
    """Return the model with frozen weights, of which adapters in each layer are the exception."""
    frozen = {"trained_expert_parameters": 0, "trained_flops": 0.0}
    layers = tuple(replace(one, trained_parameters=one.parameters // 100, **frozen) for one in work.layers)
    before, after = (replace(one, trained_parameters=0, **frozen) for one in (work.before, work.after))
    return replace(work, before=before, layers=layers, after=after)


def family_bound(some, evaluation, shape):
    """Return the least score of a shape's family with as many stages."""
    each = [np.array([one]) for one in (shape.replicas, shape.microbatches, shape.routes, shape.num_stages)]
    crosses = shape.num_stages > max(site_capacity(some, shape.gpus_per_rank, shape.replicas_of_route))
    group = np.zeros(1, dtype=int)
    (bound,) = evaluation.families.of([replace(shape, zero_stage=3)], group, *each, crosses=crosses)
    return bound


@given(
    uneven_clusters(),
    st.sampled_from(Objective),
    st.sampled_from(
        [{}, {"zero_stage": 3}, {"cell": 1}, {"expert": 4}, *({"arrangement": name} for name in LEGS), FOLDED_CELL]
    ),
    st.sampled_from([model(), model(experts=8), adapted(model())]),
)
@settings(max_examples=16, deadline=None)
def test_bounds_are_below_what_they_bound(some, objective, pins, work):
    request = replace(REQUEST, objective=objective, pins={"context": 1} | pins)
    evaluation = Evaluation(some, work, request)
    for shape in islice(shapes(some, work, request), 0, 20_000, 2003):
        bound, family = evaluation.shape_bound(shape), family_bound(some, evaluation, shape)
        for route in ways(some, shape):
            parts = [Route(route.sites[:place], route.stages[:place]) for place in range(1, len(route.sites) + 1)]
            for candidate in evaluation.candidates(shape, route):
                above = candidate.score_bound * (1 + 1e-9)
                assert bound is not None and bound <= above and family <= above
                assert all(evaluation.route_bound(shape, part) <= above for part in parts)


@pytest.mark.parametrize("arrangement", LEGS)
@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_bounds_hold_where_sites_are_good_at_different_parts(arrangement, latency_s):
    """A rank that waits for weights is better off with many products for few of them."""
    sites = site("a", gpu="A40", hosts=2, gpus_per_host=1), site("b", gpu="H100", hosts=2, gpus_per_host=1)
    some = cluster(*sites, latency_s=latency_s, bandwidth_bps=5e10)
    request = replace(REQUEST, pins={"arrangement": arrangement, "zero_stage": 3, "context": 1, "tensor": 1})
    evaluation = Evaluation(some, model(), request)
    for shape in shapes(some, model(), request):
        for route in ways(some, shape):
            for candidate in evaluation.candidates(shape, route):
                assert evaluation.route_bound(shape, route) <= candidate.score_bound * (1 + 1e-9)


@given(uneven_clusters(), st.sampled_from(Objective))
@settings(max_examples=5, deadline=None)
def test_nothing_is_better_than_proven(some, objective):
    pins = {"tensor": 1, "context": 1, "microbatch_size": 1, "schedule": "auto"}
    request = replace(REQUEST, objective=objective, pins=pins)
    if (found := planned(some, request)) is None:
        return
    evaluation = Evaluation(some, model(), request)
    for shape in shapes(some, model(), request):
        for route in ways(some, shape):
            for candidate in evaluation.candidates(shape, route):
                if candidate.score_bound < request.score(found.best) and (one := evaluation.schedule(candidate)):
                    assert request.score(one) >= request.score(found.best) / (1 + found.gap) * (1 - 1e-9)


@given(clusters(), st.floats(1.1, 10))
@settings(max_examples=15, deadline=None)
def test_more_bandwidth_never_hurts(some, factor):
    if (before := planned(some)) is None:
        return
    links = {pair: replace(link, bandwidth_bps=link.bandwidth_bps * factor) for pair, link in some.links.items()}
    after = planned(replace(some, links=links))
    assert after.best.step_s <= before.best.step_s * ANOMALY


@given(clusters(), st.integers(0, 2), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_more_gpus_never_hurt(some, number, more):
    if (before := planned(some)) is None:
        return
    number %= len(some.sites)
    after = planned(some.with_site(number, hosts=some.sites[number].hosts + more))
    assert after.best.step_s <= before.best.step_s * (1 + after.gap) * (1 + EQUAL)


@given(st.permutations(["A100", "A100", "H100"]), st.floats(1e9, 5e10))
@settings(max_examples=10, deadline=None)
def test_the_order_in_which_sites_are_listed_changes_nothing(kinds, bandwidth):
    sorted_sites = cluster(
        *(site(kind + str(place), gpu=kind) for place, kind in enumerate(sorted(kinds))), bandwidth_bps=bandwidth
    )
    other = cluster(*(site(kind + str(place), gpu=kind) for place, kind in enumerate(kinds)), bandwidth_bps=bandwidth)
    assert planned(other).best.step_s == pytest.approx(planned(sorted_sites).best.step_s, rel=1e-9)


def test_a_slow_link_is_not_used_and_a_fast_one_is():
    sites = [site("here", hosts=4), site("there", hosts=4)]
    slow = planned(cluster(*sites, bandwidth_bps=1e7, latency_s=0.1))
    fast = planned(cluster(*sites, bandwidth_bps=4e11, latency_s=0.0))
    assert len(slow.best.layout.sites) == 1 and len(fast.best.layout.sites) == 2
    assert fast.alone is not None and fast.best.step_s < fast.alone.step_s


def test_a_long_pipeline_is_found_among_many_sites():
    """Routes through many sites begin with equal bounds, so a search in the order of bounds completes none."""
    kinds = ["A100", "H100", "B200"]
    far = cluster(*(site(f"s{number}", hosts=3, gpus_per_host=8, gpu=kinds[number % 3]) for number in range(12)))
    links = {
        (here, there): replace(link, latency_s=0.002 * (1 + (7 * here + 3 * there) % 5 / 5), bandwidth_bps=4e10)
        for (here, there), link in far.links.items()
        if (5 * here + 3 * there) % 4
    }
    work = model(layers=48, parameters=800_000_000, tokens=4096, width=8192)
    request = Request(sequences=64, effort=20_000)
    found = plan(replace(far, links=links), work, request)
    pinned = plan(replace(far, links=links), work, replace(request, pins={"tensor": 4}))
    assert len(found.best.layout.sites) > 2 and found.best.step_s < found.alone.step_s / 2
    assert pinned.best.step_s >= found.best.step_s * (1 - EQUAL) / (1 + found.gap) and found.gap < 0.1


def test_constraints_are_kept():
    three = cluster(site("a", region="eu"), site("b"), site("c", region="eu"), bandwidth_bps=4e11, latency_s=0)
    home = frozenset({0, 2})
    found = plan(three, model(), replace(REQUEST, home=home))
    assert {end for way in found.best.layout.ways for end in (way.sites[0], way.sites[-1])} <= home
    alone = plan(three, model(), replace(REQUEST, max_sites=1))
    assert all(len(way.sites) == 1 for one in alone.ranked for way in one.layout.ways)
    cheap = plan(three, model(), replace(REQUEST, max_cost_per_hour=6.0))
    assert all(one.price_per_hour <= 6.0 for one in cheap.ranked)
    pinned = plan(three, model(), replace(REQUEST, pins={"num_stages": 4, "tensor": 1}))
    assert all(one.layout.num_stages == 4 and one.layout.tensor == 1 for one in pinned.ranked)


def test_faster_gpus_get_more_layers():
    mixed = cluster(
        site("fast", gpu="H100", hosts=1, gpus_per_host=1),
        site("slow", gpu="A100", hosts=1, gpus_per_host=1),
        bandwidth_bps=4e11,
        latency_s=0,
    )
    found = plan(mixed, model(layers=16), replace(REQUEST, pins={"num_stages": 2}, max_memory=1.0))
    layers = dict(zip(found.best.layout.site_of(), found.best.layout.layers, strict=True))
    assert layers[0] > 2 * layers[1]


def test_the_cheapest_plan_costs_no_more_than_the_fastest():
    some = cluster(site("a", gpu="H100", price=9.0), site("b", price=0.5))
    by = {goal: plan(some, model(), replace(REQUEST, objective=goal)).best for goal in Objective}
    assert by[Objective.cost].cost(1e9) <= by[Objective.throughput].cost(1e9)
    assert by[Objective.throughput].step_s <= by[Objective.cost].step_s


@pytest.mark.parametrize("kinds", [["H100"], ["A100", "B200", "L40S"]])
def test_a_cheap_plan_is_found_where_memory_is_scarce(kinds):
    """Bounds of costs are alike for any number of GPUs, and most of these have space for few micro-batches."""
    prices = {"H100": 2.5, "A100": 1.4, "B200": 4.5, "L40S": 0.9}
    sites = [site(kind, hosts=60, gpus_per_host=8, gpu=kind, price=prices[kind]) for kind in kinds]
    work = model(layers=80, parameters=850_000_000, tokens=4096, width=8192)
    request = Request(sequences=1024, objective=Objective.cost, effort=120_000, max_memory=0.9)
    found = plan(cluster(*sites), work, request)
    assert found.gap / (1 + found.gap) < 0.15, found.gap  # of the score of the best
    assert found.best.mfu > 0.2, found.best.layout


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"max_memory": 0.001}, "memory: the model does not fit"),
        ({"max_cost_per_hour": 0.01}, "--max-cost-per-hour: every layout costs more, the cheapest 1.5 an hour"),
        ({"pins": {"num_stages": 4, "replicas": 32}}, "--pin replicas=32: no layout has it .* choose one of 1, 2, 4$"),
        ({"pins": {"num_stages": 3, "tensor": 4}, "max_sites": 1}, "--max-sites"),
        ({"pins": {"cell": 7, "num_stages": 3}}, "--pin comm.cell=7: no layout has it .* choose one of 1, 2, 3, 4$"),
        ({"sequences": 0, "pins": {"microbatches": 2, "num_stages": 99}}, "--pin pipeline.stages=99: no layout has it"),
    ],
)
def test_what_no_layout_meets_is_named(changes, part):
    with pytest.raises(ValueError, match=part):
        plan(cluster(site("a"), site("b")), model(), replace(REQUEST, **changes))


def test_gpus_that_share_experts_are_neighbours_of_which_those_that_share_weights_are_some():
    some, work = cluster(site("a", hosts=4, gpus_per_host=8)), replace(model(experts=12), heads=8)
    found = {(one.tensor, one.expert) for one in shapes(some, work, replace(REQUEST, pins={"num_stages": 1}))}
    assert found == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 4), (8, 1)}
    assert all(one.expert == 1 for one in shapes(some, model(), REQUEST))


def test_of_plans_that_cost_nothing_the_fastest_is_best():
    some = cluster(site("a", price=0.0), site("b", gpu="H100", price=0.0), bandwidth_bps=1e7, latency_s=0.1)
    found = plan(some, model(), replace(REQUEST, objective=Objective.cost))
    assert found.best.layout.sites == (1,) and found.best.cost(1e9) == 0
    assert found.best.step_s == pytest.approx(plan(some, model(), REQUEST).best.step_s)


def test_of_equal_sites_the_cheaper_is_taken():
    some = cluster(site("dear", price=3.0), site("cheap", price=1.0), bandwidth_bps=1e7, latency_s=0.1)
    for objective in Objective:
        found = plan(some, model(), replace(REQUEST, objective=objective))
        assert found.alone.layout.sites == (1,)


def test_a_plan_ranks_layouts_that_differ_and_says_how_many_it_looked_at():
    some = cluster(site("a"), site("b"), bandwidth_bps=1e10)
    found = plan(some, model(), REQUEST)
    assert len(found.ranked) > 2
    assert found.best is found.ranked[0] and found.alone in found.ranked
    assert found.alone.layout.sites in [(0,), (1,)]
    assert all(len(one.layout.sites) > 1 for one in found.ranked[: found.ranked.index(found.alone)])
    assert 0 < found.scheduled < found.shapes
    assert 0.0 <= found.gap < 1.0


def test_an_effort_that_ends_early_says_what_may_be_better():
    some = cluster(site("a"), site("b"), bandwidth_bps=1e10)
    early, late = (plan(some, model(), replace(REQUEST, effort=effort)) for effort in (0, 10**6))
    assert early.gap > 0.0 and early.scheduled < late.scheduled
    best, found = (REQUEST.score(one.best) for one in (late, early))
    assert best <= found and best >= found * (1 - 1e-9) / (1 + early.gap)
    assert late.gap <= WORTH - 1
