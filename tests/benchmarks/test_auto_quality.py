"""Known results of `auto` on small cases, each of which needs some rule or some move of the search."""

from dataclasses import replace

import pytest

from tests.pipeline.generators.random_cases import random_case
from tests.pipeline.generators.random_clusters import compare, random_cluster
from tests.pipeline.generators.test_auto_cell import costs_of, step_s
from tests.pipeline.pair_costs import scaled
from weft.pipeline.generators.auto import _list_schedules, _problem, generate_auto
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate


def case(seed):
    """One of the random cases; every third with strand pairs that gain."""
    found = random_case(seed)
    return replace(found, costs=replace(found.costs, pairs=scaled(0.7))) if seed % 3 == 0 else found


@pytest.mark.parametrize(
    ("seed", "listed_s", "searched_s"),
    [
        (1, 152, 152),
        (6, 183, 183),
        (12, 291, 291),
        (16, 230, 230),
        (17, 182, 182),
        (18, 209.8, 209.8),
        (23, 181, 181),
        (25, 165, 164),
        (36, 99, 96.7),
        (37, 136, 136),
        (41, 238, 237),
        (42, 84.4, 84.4),
        (47, 177, 175),
    ],
)
def test_under_a_cap(seed, listed_s, searched_s):
    """By list scheduling alone, and with a few hundred moves."""
    one = case(seed)
    for search_s, known_s in ((0.0, listed_s), (0.01, searched_s)):
        schedule = generate_auto(one.placement, one.num_microbatches, one.costs, one.cap_bytes, search_s)
        assert simulate(schedule, one.costs).step_s <= known_s + 1e-6


@pytest.mark.parametrize(
    ("seed", "known_s"),
    [
        (220, 181),
        (221, 181),
        (255, 339),
        (257, 271),
        (276, 202),
        (300, 270),
        (305, 656),
        (308, 221),
        (315, 143.7),
        (334, 339),
        (369, 248),
        (399, 75.4),
        (416, 181),
        (484, 167),
        (552, 187.3),
        (555, 357.4),
        (567, 262.2),
        (690, 233),
        (1031, 291),
        (1124, 366.5),
        (1200, 110.4),
        (1238, 701),
        (1407, 280),
    ],
)
def test_cases_that_one_rule_alone_does_best(seed, known_s):
    """The slowest of 1,400 random cases without that rule, or with one of its numbers larger by 1."""
    one = case(seed)
    problem = _problem(one.placement, one.num_microbatches, one.costs, until_weight=False)
    assert min(_list_schedules(problem, one.cap_bytes))[0] <= known_s + 1e-3


@pytest.mark.parametrize(("seed", "known_s"), [(1, 150), (12, 190), (18, 173.6), (31, 98), (38, 130), (42, 84.4)])
def test_without_a_cap(seed, known_s):
    one = case(seed)
    schedule = generate_auto(one.placement, one.num_microbatches, one.costs)
    assert simulate(schedule, one.costs).step_s <= known_s + 1e-6


@pytest.mark.parametrize(
    ("sites", "pipelines", "transfer_s", "microbatches", "cap", "known_s"),
    [((1, 2, 1), 3, 3.0, 6, 12, 52), ((2, 2), 2, 2.0, 4, 6, 39)],
)
def test_cells_whose_forwards_have_to_be_held_back(sites, pipelines, transfer_s, microbatches, cap, known_s):
    placement = replace(Placement.site_fold(sites), pipelines=pipelines)
    costs = costs_of(placement.single, transfer=transfer_s).for_cell(pipelines)
    assert step_s(generate_auto(placement, microbatches, costs, cap), costs) <= known_s + 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_never_slower_than_a_fixed_schedule_on_any_placement(seed):
    """`benchmarks auto` does it for 200."""
    outcome = compare(random_cluster(seed))
    assert outcome.auto.step_s <= outcome.fixed_s * (1 + 1e-9), outcome
    assert not outcome.slower
