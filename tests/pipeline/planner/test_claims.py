"""Tests of plans against all layouts of random small clusters, by a second model and the simulator."""

from dataclasses import replace

import pytest

from tests.pipeline.planner import odd_cases
from tests.pipeline.planner.changes import compared, is_refuted
from tests.pipeline.planner.judge import judge
from tests.pipeline.planner.own_model import Own
from tests.pipeline.planner.planned import cluster, model, site
from tests.pipeline.planner.random_cases import case
from weft.pipeline.planner.request import Objective, Request
from weft.pipeline.planner.search import plan

CHUNK = 25


def refuted(seeds):
    """By seed, layouts that are better than a plan claims, and those that are as fast and cheaper."""
    verdicts = {seed: judge(*case(seed)) for seed in seeds}
    return {seed: (one.best, one.cheaper) for seed, one in verdicts.items() if one.best or one.cheaper}


@pytest.mark.parametrize("seed", range(CHUNK))
def test_no_layout_is_better_than_the_gap_allows_and_none_as_fast_is_cheaper(seed):
    assert not refuted([seed])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CHUNK, 200, CHUNK))
def test_no_layout_of_many_clusters_is_better_than_the_gap_allows(first):
    assert not refuted(range(first, first + CHUNK))


def changes_that_refute(kind, seeds):
    """By seed and change, how much worse a plan is and how much is allowed."""
    each = [(seed, *one) for seed in seeds for one in compared(kind, *case(seed))]
    return [one for one in each if is_refuted(*one[2:])]


@pytest.mark.parametrize("seed", [4, 23, 34])
def test_no_pin_beats_an_unpinned_plan_by_more_than_its_gap(seed):
    assert not changes_that_refute("pins", [seed])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25, 50))
def test_no_pin_beats_any_of_many_plans_by_more_than_its_gap(seed):
    assert not changes_that_refute("pins", [seed])


@pytest.mark.parametrize("seed", [1, 22, 44])
def test_more_gpus_memory_or_bandwidth_and_lower_prices_make_no_plan_worse_than_its_gap_allows(seed):
    assert not changes_that_refute("resources", [seed])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(25, 100, 5))
def test_more_of_anything_makes_none_of_many_plans_worse_than_its_gap_allows(first):
    assert not changes_that_refute("resources", range(first, first + 5))


@pytest.mark.parametrize("seed", range(10))
def test_predictions_are_those_of_the_documented_model(seed):
    """Compare all ranked plans with the second model, timed by the simulator."""
    some, work, request = case(seed)
    own = Own(some, work, request)
    try:
        found = plan(some, work, request)
    except ValueError:
        return
    for one in found.ranked:
        assert one.step_s == pytest.approx(own.step_s(one.layout), rel=1e-6), one.layout
        assert one.price_per_hour == pytest.approx(own.price_per_hour(one.layout))
        assert one.egress_per_step == pytest.approx(own.egress(one.layout), abs=1e-12)


@pytest.mark.parametrize("seed", [2, 97])
def test_no_layout_of_odd_clusters_is_better_than_the_gap_allows(seed):
    verdict = judge(*odd_cases.case(seed))
    assert verdict.found and not verdict.best and not verdict.cheaper


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_no_layout_of_many_odd_clusters_is_better_than_the_gap_allows(first):
    verdicts = {seed: judge(*odd_cases.case(seed)) for seed in range(first, first + CHUNK)}
    assert not {seed: one.best or one.cheaper for seed, one in verdicts.items() if one.best or one.cheaper}


def test_a_link_may_be_faster_than_the_network_of_a_site():
    """The price allows one GPU of each site, between which a fold is fastest."""
    sites = [site("a", hosts=1, gpus_per_host=2, gpu="A100-40GB", price=1.4), site("b", 1, 1, gpu="A40", price=0.0)]
    some = cluster(*(replace(one, network_bps=1e9) for one in sites), latency_s=0.0005, bandwidth_bps=4e11)
    verdict = judge(
        some, model(layers=6, parameters=20_000_000, tokens=2048), Request(sequences=2, max_cost_per_hour=1.5)
    )
    assert verdict.found and not verdict.best and not verdict.cheaper


@pytest.mark.parametrize("objective", Objective)
def test_a_model_that_fits_only_on_routes_without_links_has_no_plan(objective):
    """Only replicas on routes of their own would fit, and these need links between all sites of a rank."""
    whole = cluster(*(site(name, hosts=1, gpus_per_host=1) for name in "abcd"))
    chain = replace(whole, links={pair: link for pair, link in whole.links.items() if pair[1] - pair[0] == 1})
    work, request = model(layers=2, parameters=2_000_000_000), Request(sequences=2, objective=objective)
    verdict = judge(chain, work, request)
    assert verdict.found is None and verdict.best is None


def test_a_site_may_hold_fewer_ranks_than_fit():
    """Where a slow site is filled up, the fast one behind it holds less."""
    some = cluster(
        site("slow", hosts=8, gpus_per_host=1),
        site("fast", hosts=2, gpus_per_host=1, gpu="H100"),
        latency_s=0.001,
        bandwidth_bps=2e10,
    )
    request = Request(sequences=16)
    work = model(layers=6)
    fewer = plan(some.with_site(0, hosts=2), work, request)
    found = plan(some, work, request)
    assert request.score(found.best) / (1 + found.gap) <= request.score(fewer.best)
    assert found.best.step_s <= fewer.best.step_s * 1.002


def test_any_number_of_stages_may_be_best():
    """Six layers and a head on four ranks: two layers on each of three ranks are one GPU fewer, and slower."""
    some = cluster(site("a", hosts=4, gpus_per_host=1, gpu="H100"))
    work, pins = model(layers=6, parameters=400_000_000), {"replicas": 1, "tensor": 1}
    found = plan(some, work, Request(sequences=24, pins=pins))
    for stages in range(1, 5):
        pinned = plan(some, work, Request(sequences=24, pins={**pins, "num_stages": stages}))
        assert found.best.step_s <= pinned.best.step_s * 1.002
