"""`auto` where costs are nothing, tiny, huge or alike: ties never become strand pairs that wait for each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.generators.pipelines import placements
from tests.pipeline.pair_costs import scaled
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    placements(),
    st.integers(1, 6),
    st.sampled_from([0.0, 1e-300, 1e-11, 1e300]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([0.0, 0.005]),
)
def test_any_seconds_give_a_schedule_that_runs(data, placement, num_microbatches, odd_s, pair_scale, search_s):
    seconds = st.sampled_from([0.0, odd_s, odd_s, 1.0])
    stages = tuple(
        StageCost(
            forward_s=data.draw(seconds),
            input_s=data.draw(seconds),
            weight_s=data.draw(seconds),
            activation_bytes=data.draw(st.integers(0, 1)),
            output_bytes=data.draw(st.integers(0, 1)),
        )
        for _ in range(placement.num_stages)
    )
    wan = LinkCost(latency_s=data.draw(seconds), bandwidth_bps=data.draw(st.sampled_from([8.0, 1e300])))
    costs = CostModel(stages=stages, wan=wan, pairs=scaled(pair_scale))
    validate(generate_auto(placement, num_microbatches, costs, search_seconds=search_s))


@pytest.mark.parametrize("second", [1e-11, 1e-3, 1e6])
def test_the_unit_of_time_changes_nothing(second):
    """A tenth of a second ties as a whole one does, whatever their sums round to."""
    placement = Placement.fold(4)

    def step(unit):
        stage = StageCost(forward_s=unit, input_s=unit, weight_s=unit, activation_bytes=1)
        costs = CostModel(stages=(stage,) * 8, pairs=scaled(0.9))
        return simulate(generate_auto(placement, 8, costs, 9, 0.02), costs).step_s / unit

    assert step(0.1 * second) == pytest.approx(step(1.0))


def test_pairs_stay_where_only_some_costs_are_nothing():
    """A stage without work, such as one with the embedding alone, costs the others no pair."""
    work = StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=1)
    none = StageCost(forward_s=0, input_s=0, weight_s=0, activation_bytes=0)
    costs = CostModel(stages=(none, *(work,) * 7), pairs=scaled(0.6))
    schedule = generate_auto(Placement.fold(4), 12, costs, 9)
    validate(schedule)
    assert sum(len(slot) == 2 for row in schedule.rows for slot in row) >= 36
