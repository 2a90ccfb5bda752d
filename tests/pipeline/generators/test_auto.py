"""`auto`: valid under any cap, no worse than the fixed schedules, the same on every rank."""

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.generators.duels import compare, exported_step
from tests.pipeline.generators.pipelines import costs_of, least_cap_bytes, placements
from tests.pipeline.pair_costs import scaled
from weft.pipeline.action import Op
from weft.pipeline.cell import add_relays
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate, generators
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.lowering import as_run, lower
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate


@settings(max_examples=100, deadline=None)
@given(st.data(), placements(), st.integers(1, 9), st.sampled_from([1.0, 0.7]), st.sampled_from([0.0, 0.02]))
def test_any_pipeline_gets_a_valid_schedule_under_its_cap(data, placement, num_microbatches, pair_scale, search_s):
    costs = data.draw(costs_of(placement, pair_scale))
    cap_bytes = least_cap_bytes(placement, costs) + data.draw(st.integers(0, 30))
    schedule = generate_auto(placement, num_microbatches, costs, cap_bytes, search_s)
    validate(schedule, costs=costs, memory_cap_bytes=cap_bytes)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_bytes) <= cap_bytes
    assert timeline.step_s >= lower_bound_s(Problem(placement, num_microbatches, costs)) - 1e-6


@settings(max_examples=60, deadline=None)
@given(st.data(), placements(), st.integers(1, 9), st.sampled_from([1.0, 0.7]))
def test_the_search_times_rows_as_the_simulator_does(data, placement, num_microbatches, pair_scale):
    costs = data.draw(costs_of(placement, pair_scale))
    schedule = generate_auto(placement, num_microbatches, costs)
    problem = Problem(placement, num_microbatches, costs)
    timing = time_rows(problem, problem.rows(schedule.rows))
    timeline = simulate(schedule, costs)
    assert timing.rank_end_s == pytest.approx([lane[-1].end_s for lane in timeline.compute])


@settings(max_examples=40, deadline=None)
@given(st.data(), placements(), st.integers(1, 6))
def test_the_search_never_makes_it_worse(data, placement, num_microbatches):
    costs = data.draw(costs_of(placement))
    cap_bytes = 2 * least_cap_bytes(placement, costs)
    found = [generate_auto(placement, num_microbatches, costs, cap_bytes, search_s) for search_s in (0.0, 0.03)]
    before_s, after_s = (max(lane[-1].end_s for lane in simulate(s, costs).compute) for s in found)
    assert after_s <= before_s + 1e-9


def test_without_a_cap_no_generator_is_faster():
    rng = random.Random(2)
    for _ in range(120):
        placement = Placement.fold(rng.randint(2, 4))
        stages = tuple(
            StageCost(
                forward_s=rng.uniform(0.9, 1.1),
                input_s=rng.uniform(0.9, 1.3),
                weight_s=rng.uniform(0.5, 1.1),
                activation_bytes=rng.randint(1, 4),
                weight_saved_bytes=rng.randint(0, 4),
            )
            for _ in range(placement.num_stages)
        )
        costs = CostModel(stages=stages, local=LinkCost(latency_s=rng.choice([0, 0.05, 0.3])))
        num_microbatches = rng.randint(1, 20)

        def step_s(schedule, costs=costs):
            return simulate(add_relays(lower(schedule), costs), costs).step_s

        auto_s = step_s(generate_auto(placement, num_microbatches, costs))
        for kind in sorted(generators().keys() - {"auto"}):
            with suppress(ValueError):  # it needs another placement, or more micro-batches
                fixed = as_run(generate(kind, placement, num_microbatches), costs)
                assert auto_s <= step_s(fixed) * (1 + 1e-6), kind


def test_every_rank_finds_the_same_schedule():
    placement, costs = Placement.site_fold((2, 2)), CostModel.unit(8, wan=LinkCost(latency_s=2, bandwidth_bps=3))
    first, second = (generate_auto(placement, 6, costs, 7, 0.1) for _ in range(2))
    assert first == second


SIZES = [(2, 1), (2, 64), (3, 4), (3, 7), (4, 2), (4, 8), (5, 12), (6, 13), (8, 8), (8, 31), (11, 16), (16, 24)]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_no_worse_than_a_fixed_schedule_in_the_same_memory(num_ranks, num_microbatches):
    for comparison in compare(num_ranks, num_microbatches):
        assert comparison.auto <= comparison.fixed, comparison


def test_the_yardstick():
    """Four folded ranks, eight micro-batches, a unit each: ZB-V takes 51 units with 8 live chunks."""
    schedule = generate_auto(Placement.fold(4), 8, CostModel.unit(8))
    assert exported_step(schedule) == (51, 8)


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 5, 16])
def test_without_a_cap_a_fold_takes_what_1f1b_takes(num_ranks, num_microbatches):
    """Counting until the weight gradient is done, even where the cost model frees it before."""
    schedule = generate_auto(Placement.fold(num_ranks), num_microbatches, CostModel.unit(2 * num_ranks))
    for row in schedule.rows:
        live = peak = 0
        for action in (action for slot in row for action in slot):
            live += action.op is Op.F
            peak = max(peak, live)
            live -= action.op in (Op.W, Op.B)
        assert peak <= 2 * num_ranks


def test_without_a_cap_more_memory_is_taken_where_it_buys_time():
    """Over a WAN of ten forwards' latency, P micro-batches cannot fill the pipeline."""
    placement = Placement.straight(4, (2, 2))
    costs = CostModel.unit(4, wan=LinkCost(latency_s=10))
    assert max(simulate(generate_auto(placement, 24, costs), costs).peak_bytes) > 4


def test_a_full_backward_where_no_rank_waits_for_the_gradient():
    schedule = generate_auto(Placement.straight(1), 3, CostModel.unit(1))
    assert schedule.ops == {Op.F, Op.B}


def test_pairs_are_formed_where_they_gain():
    placement = Placement.fold(4)
    stage = StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=1)
    costs = CostModel(stages=(stage,) * 8, pairs=scaled(0.8))
    schedule = generate_auto(placement, 16, costs, 9)
    alone = CostModel(stages=costs.stages)
    singles = generate_auto(placement, 16, alone, 9)
    pairs = sum(len(slot) == 2 for row in schedule.rows for slot in row)
    assert pairs >= 4 * 16
    assert simulate(schedule, costs).step_s < 0.9 * simulate(singles, alone).step_s


def test_a_cap_below_one_microbatch_names_the_remedy():
    with pytest.raises(ValueError, match=r"memory_cap_bytes=1: one micro-batch alone holds 2 bytes .* raise the cap"):
        generate_auto(Placement.fold(2), 4, CostModel.unit(4), 1)


def test_costs_of_another_pipeline_are_refused():
    with pytest.raises(ValueError, match="costs of 3 virtual stages, the placement has 4"):
        generate_auto(Placement.fold(2), 4, CostModel.unit(3))
