"""When measured costs make the schedule be planned again, and that noise never does."""

from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.planning.deviation import Deviation, clean, interval_of, with_measured
from weft.pipeline.costs import CostModel, LinkCost

STAGES, STEPS = 3, 30
WINDOW = interval_of(STEPS, 7)


def vector(factors=(1.0, 1.0, 1.0), link=1.0):
    seconds = [part * factor for factor in factors for part in (0.01, 0.012, 0.008)]
    return [*seconds, 0.0, 1e-8 * link, 0.0, 0.0]


def deviation():
    return Deviation(num_stages=STAGES, steps=STEPS, interval=WINDOW)


def plans(windows):
    """The steps after which a plan is made, if each is ready at the next window."""
    watch, found = deviation(), []
    for number, window in enumerate(windows, start=1):
        step = number * WINDOW
        if found and found[-1] == step - WINDOW:
            watch.planned(step)
        elif watch.observe(step, window):
            found.append(step)
    return found


def medians(speed_of_step, count):
    """Windows whose stage 1 takes the median of what its steps take."""
    for first in range(1, count, WINDOW):
        factors = sorted(speed_of_step(step) for step in range(first, first + WINDOW))
        middle = (factors[(WINDOW - 1) // 2] + factors[WINDOW // 2]) / 2
        yield vector((1.0, middle, 1.0))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), noise=st.floats(0.0, 0.08))
def test_noise_never_causes_a_plan(seed, noise):
    random = Random(seed)
    windows = [[value * random.uniform(1 - noise, 1 + noise) for value in vector()] for _ in range(500 // WINDOW)]
    assert not plans(windows)


@settings(max_examples=60, deadline=None)
@given(factor=st.floats(1.05, 10.0), offset=st.integers(0, 39))
def test_a_rank_that_alternates_every_20_steps_causes_no_plan(factor, offset):
    settled = 2 * STEPS  # so that the reference is of the fast rank

    def speed(step):
        return factor if step > settled and (step + offset) // 20 % 2 else 1.0

    assert not plans(medians(speed, 600))


@settings(max_examples=40, deadline=None)
@given(period=st.integers(1, 300), factor=st.floats(1.3, 5.0))
def test_plans_become_rare_whatever_alternates(period, factor):
    assert len(plans(medians(lambda step: factor if step // period % 2 else 1.0, 64 * STEPS))) <= 7


def test_stages_that_are_slow_in_turn_cause_no_plan():
    slow = [vector([2.0 if stage == window % STAGES else 1.0 for stage in range(STAGES)]) for window in range(100)]
    assert not plans([vector()] * 20 + slow)


@settings(max_examples=60, deadline=None)
@given(factor=st.floats(1.25, 10.0) | st.floats(0.1, 0.75), stage=st.integers(0, STAGES - 1))
def test_a_lasting_change_causes_one_plan_with_the_measured_costs(factor, stage):
    factors = [1.0] * STAGES
    factors[stage] = factor
    quiet, changed = [vector()] * 20, [vector(factors)] * 60
    (step,) = plans(quiet + changed)
    assert 0 <= step - 20 * WINDOW - STEPS < WINDOW


@settings(max_examples=60, deadline=None)
@given(factor=st.floats(1.3, 10.0), speed=st.floats(0.1, 10.0), stage=st.integers(0, STAGES - 1))
def test_a_stage_that_is_slower_than_planned_from_the_start_causes_one_plan(factor, speed, stage):
    slow = [factor if other == stage else 1.0 for other in range(STAGES)]
    watch, steps = deviation(), []
    watch.plan_costs = tuple(value * speed for value in vector())
    for number in range(1, 60):
        if watch.observe(WINDOW * number, vector(slow)):
            assert watch.changes() == {f"stage {stage}": pytest.approx(factor)}
            assert watch.measured[: 3 * STAGES] == pytest.approx(vector(slow)[: 3 * STAGES])
            steps.append(WINDOW * number)
            watch.planned(WINDOW * number)
    assert len(steps) == 1 and steps[0] <= 3 * STEPS


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), speed=st.floats(0.1, 10.0))
def test_costs_that_are_all_wrong_by_one_factor_cause_no_plan(seed, speed):
    random, watch = Random(seed), deviation()
    watch.plan_costs = tuple(value * speed for value in vector())
    windows = [[value * random.uniform(0.95, 1.05) for value in vector()] for _ in range(200 // WINDOW)]
    assert not any(watch.observe(WINDOW * number, window) for number, window in enumerate(windows, start=1))


def test_a_slower_link_causes_a_plan_and_is_named():
    watch = deviation()
    for window in [vector()] * 10:
        assert not watch.observe(0, window)
    assert any(watch.observe(0, vector(link=3.0)) for _ in range(STEPS))
    assert watch.changes() == {"link from site 0 to 1": pytest.approx(3.0)}
    costs = CostModel.unit(STAGES, wan=LinkCost(latency_s=0.02, bandwidth_bps=3e8))
    slower = with_measured(costs, watch.measured, watch.reference, 2)
    assert slower.link(0, 1) == LinkCost(latency_s=0.02, bandwidth_bps=pytest.approx(1e8))
    assert slower.link(1, 0) == costs.wan
    assert slower.stages[1].input_s == pytest.approx(0.012)


HOSTILE = st.sampled_from([nan, inf, -inf, 0.0, -1.0, 1e300, 1e9]) | st.floats()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(HOSTILE, min_size=13, max_size=13), min_size=40, max_size=40))
def test_numbers_that_are_no_durations_are_not_measured(windows):
    cleaned = [clean(window) for window in windows]
    assert all(0.0 <= value <= 3600.0 for window in cleaned for value in window)
    plans(windows)  # without an error


def test_a_single_rank_that_sends_nan_causes_no_plan():
    broken = vector()
    broken[3:6] = [nan, 0.0, inf]
    assert not plans([vector()] * 20 + [broken] * 60)


def test_the_first_windows_widen_the_tolerance_to_their_spread():
    noisy = [vector((1.0, factor, 1.0)) for factor in (1.0, 0.8, 1.2, 0.85, 1.15, 1.0)]
    assert not plans(noisy + [vector((1.0, 1.5, 1.0))] * 40)
    assert plans(noisy + [vector((1.5, 1.0, 1.0))] * 40)
