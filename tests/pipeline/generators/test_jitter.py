"""Jitter: sampled durations follow it, and `auto` plans against them within the cap."""

from dataclasses import replace
from math import log
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.generators.pipelines import costs_of, least_cap_bytes, placements
from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.jitter import sampled_s
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.profile import fit_costs
from weft.pipeline.simulation import sampled_steps_s, simulate
from weft.pipeline.validation import validate

OTHERS = range(-200, 0)
"""Samples that no plan is made with."""


def with_jitter(costs, *jitter):
    stages = zip(costs.stages, jitter, strict=True)
    return replace(costs, stages=tuple(replace(stage, jitter=each) for stage, each in stages))


def with_link_jitter(costs, jitter):
    local, wan = (replace(link, jitter=jitter) for link in (costs.local, costs.wan))
    return replace(costs, local=local, wan=wan)


def mean_step_s(schedule, costs):
    return fmean(sampled_steps_s(lower(schedule), costs, OTHERS))


def test_sampled_durations_have_the_median_and_the_jitter_of_their_stage():
    costs = with_jitter(CostModel.unit(2), 0.0, 0.5)
    drawn = [sampled_s(costs, Action(Op.F, 1, m), sample) for sample in range(40) for m in range(50)]
    assert median(drawn) == pytest.approx(1.0, abs=0.05)
    assert pstdev(map(log, drawn)) == pytest.approx(0.5, abs=0.03)
    assert {sampled_s(costs, Action(Op.F, 0, m), 3) for m in range(9)} == {1.0}
    whole, parts = Action(Op.B, 1, 4), [Action(op, 1, 4) for op in (Op.I, Op.W)]
    assert sampled_s(costs, whole, 7) == sum(sampled_s(costs, part, 7) for part in parts)


def test_joined_and_divided_stages_keep_the_largest_jitter():
    costs = with_jitter(CostModel.unit(4), 0.1, 0.3, 0.2, 0.0)
    assert [stage.jitter for stage in costs.cut(2).stages] == [0.3, 0.2]
    assert [stage.jitter for stage in costs.cut(8).stages] == [0.1, 0.1, 0.3, 0.3, 0.2, 0.2, 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(st.data(), placements(), st.integers(1, 6), st.sampled_from([1.0, 0.7]))
def test_the_search_times_samples_as_the_simulator_does(data, placement, num_microbatches, pair_scale):
    costs = data.draw(costs_of(placement, pair_scale))
    costs = with_jitter(costs, *(0.4 * (stage % 2) for stage in range(placement.num_stages)))
    costs = with_link_jitter(costs, data.draw(st.sampled_from([0.0, 0.6])))
    schedule = generate_auto(placement, num_microbatches, costs)
    problem = Problem(placement, num_microbatches, costs, samples=3)
    rows = problem.rows(schedule.rows)
    for sample in range(3):
        timeline = simulate(schedule, costs, sample)
        timing = time_rows(problem, rows, problem.sampled[sample])
        assert timing.rank_end_s == pytest.approx([lane[-1].end_s for lane in timeline.compute])


@settings(max_examples=25, deadline=None)
@given(st.data(), placements(), st.integers(1, 6), st.sampled_from([1.0, 0.7]))
def test_plans_against_samples_keep_to_the_cap_and_are_valid(data, placement, num_microbatches, pair_scale):
    costs = with_jitter(data.draw(costs_of(placement, pair_scale)), *[0.5] * placement.num_stages)
    cap_bytes = least_cap_bytes(placement, costs) + data.draw(st.integers(0, 30))
    schedule = generate_auto(placement, num_microbatches, costs, cap_bytes, 0.01, jitter_samples=2)
    validate(schedule, costs=costs, memory_cap_bytes=cap_bytes)
    assert schedule == generate_auto(placement, num_microbatches, costs, cap_bytes, 0.01, jitter_samples=2)


@pytest.mark.parametrize(("slow_end", "reduce_s"), [(0, 0.0), (1, 0.0), (0, 3.0)])
def test_a_plan_against_samples_is_faster_where_one_stage_varies(slow_end, reduce_s):
    stage = StageCost(
        forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0, output_bytes=1.0, reduce_s=reduce_s
    )
    costs = with_jitter(CostModel(stages=(stage,) * 4), *(0.5 * (each == slow_end) for each in range(4)))
    usual, sampled = (generate_auto(Placement.straight(4), 8, costs, 0.0, 0.3, samples) for samples in (0, 16))
    assert mean_step_s(sampled, costs) < 0.98 * mean_step_s(usual, costs)


@pytest.mark.parametrize("jitter", [(0.05,) * 4, (0.2,) * 4, (0.0, 0.0, 0.0, 3.0), (1.0, 0.0, 0.3, 0.0)])
def test_a_plan_against_samples_is_never_slower_beyond_noise(jitter):
    costs = with_jitter(CostModel.unit(4), *jitter)
    usual, sampled = (generate_auto(Placement.straight(4), 6, costs, 8.0, 0.1, samples) for samples in (0, 16))
    assert mean_step_s(sampled, costs) <= 1.01 * mean_step_s(usual, costs)


def test_sampled_transfers_have_the_median_and_the_jitter_of_their_link():
    link = LinkCost(latency_s=0.5, bandwidth_bps=16.0, jitter=0.4)  # 1 s for the byte and its latency
    costs = CostModel.unit(2, local=link)
    schedule = lower(generate("gpipe", Placement.straight(2), 8))
    drawn = [
        span.end_s - span.start_s
        for sample in range(150)
        for span in simulate(schedule, costs, sample).spans
        if span.lane.peer is not None
    ]
    assert median(drawn) == pytest.approx(1.0, abs=0.05)
    assert pstdev(map(log, drawn)) == pytest.approx(0.4, abs=0.03)


@settings(max_examples=10, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 5))
def test_jitter_of_a_link_that_no_transfer_takes_leaves_the_plan_by_medians(data, ranks, num_microbatches):
    placement = Placement.straight(ranks)
    costs = data.draw(costs_of(placement))
    idle = replace(costs, wan=replace(costs.wan, jitter=0.5))
    usual = generate_auto(placement, num_microbatches, costs, 0.0, 0.01)
    assert generate_auto(placement, num_microbatches, idle, 0.0, 0.01, jitter_samples=4).rows == usual.rows


@settings(max_examples=10, deadline=None)
@given(st.data(), st.sampled_from([(1, 1), (2, 2), (1, 2, 1)]), st.integers(2, 6), st.floats(0.05, 1.0))
def test_a_plan_against_jitter_of_links_is_never_slower_beyond_noise(data, sites, num_microbatches, jitter):
    placement = Placement.straight(sum(sites), sites)
    costs = data.draw(costs_of(placement))
    slow = LinkCost(latency_s=data.draw(st.floats(0.1, 4.0)), bandwidth_bps=8.0, jitter=jitter)
    costs = replace(costs, wan=slow)
    usual, sampled = (generate_auto(placement, num_microbatches, costs, 0.0, 0.02, samples) for samples in (0, 16))
    assert mean_step_s(sampled, costs) <= 1.01 * mean_step_s(usual, costs)


@pytest.mark.parametrize(("latency_s", "num_microbatches"), [(2.0, 8), (1.0, 12)])
def test_a_plan_against_samples_hides_the_jitter_of_a_link(latency_s, num_microbatches):
    link = LinkCost(latency_s=latency_s, bandwidth_bps=16.0, jitter=0.8)
    costs = CostModel.unit(4, wan=link)
    placement = Placement.straight(4, (2, 2))
    usual, sampled = (generate_auto(placement, num_microbatches, costs, 0.0, 0.3, samples) for samples in (0, 16))
    assert mean_step_s(sampled, costs) < 0.99 * mean_step_s(usual, costs)


def test_costs_without_jitter_are_refused():
    with pytest.raises(ValueError, match=r"pipeline\.jitter_samples=16: the costs have no jitter"):
        generate("auto", Placement.straight(2), 4, jitter_samples=16)


def test_jitter_is_fitted_to_timelines():
    costs = with_jitter(CostModel.unit(2), 0.0, 0.3)
    schedule = lower(generate("1f1b", Placement.straight(2), 8))
    fitted = fit_costs([simulate(schedule, costs, sample) for sample in range(20)], CostModel.unit(2))
    first, second = (stage.jitter for stage in fitted.stages)
    assert first == pytest.approx(0.0, abs=1e-9)
    assert 0.2 < second < 0.3  # a whole backward is the sum of two
