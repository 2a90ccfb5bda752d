"""Every generator, on every placement that it takes, with any number of micro-batches."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.cases import schedules
from weft.conf.schedule_kinds import PlacementKind
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate, generators
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import ScheduleError
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate


@settings(max_examples=150)
@given(schedules())
def test_generated_schedules_are_valid_before_and_after_lowering(schedule):
    validate(schedule)
    validate(lower(schedule))


@settings(max_examples=15)
@given(schedules(kinds=("auto",)))
def test_searched_schedules_are_too(schedule):
    validate(schedule)
    validate(lower(schedule))


LARGE = {
    PlacementKind.straight: Placement.straight(4, (2, 2)),
    PlacementKind.interleaved: Placement.interleaved(4, 2, (2, 2)),
    PlacementKind.fold: Placement.fold(4, sites=(2, 2)),
    PlacementKind.site_fold: Placement.site_fold((2, 2)),
    PlacementKind.site_interleaved: Placement((2, 2), "dd", (2, 2)),
}


@pytest.mark.parametrize("kind", generators())
def test_a_kind_takes_what_its_rules_say_and_nothing_else(kind):
    rules = generators()[kind]
    for name, placement in LARGE.items():
        least = max(1, rules.microbatches_per_rank * placement.num_ranks)
        if name in rules.placements and not (rules.goes_in_rounds and name is PlacementKind.straight):
            assert generate(kind, placement, least, search_seconds=0.0).name == kind
        else:
            with pytest.raises(ValueError, match=f"pipeline.schedule={kind}: it (needs|pairs)"):
                generate(kind, placement, least)
        if least > 1:
            with pytest.raises(ValueError, match=f"the {kind} schedule needs at least .* = {least}; raise it"):
                generate(kind, placement, least - 1)


@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 60))
def test_interleaved_takes_any_number_of_microbatches(num_ranks, chunks, num_microbatches):
    validate(generate("interleaved", Placement.interleaved(num_ranks, chunks), num_microbatches))


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 24), st.integers(0, 30))
def test_micro_batches_of_a_chunk_are_launched_together(num_ranks, chunks, num_microbatches, together):
    placement = Placement.interleaved(num_ranks, chunks)
    least = num_ranks + together
    schedule = generate("interleaved", placement, num_microbatches, launch_together=least)
    validate(schedule)
    forwards = [a for a in schedule.actions(0) if a.op.value == "F"]
    in_a_row = min(least, num_microbatches)
    assert {a.stage for a in forwards[:in_a_row]} == {0}
    assert [a.microbatch for a in forwards[:in_a_row]] == list(range(in_a_row))


def test_rounds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"launch_together=3: a round .* at least 4"):
        generate("interleaved", Placement.interleaved(4, 2), 8, launch_together=3)
    with pytest.raises(ValueError, match="schedule=1f1b has no rounds"):
        generate("1f1b", Placement.straight(4), 8, launch_together=4)


@given(st.integers(1, 8), st.integers(1, 24))
def test_1f1b_takes_its_formula_of_time_and_memory(num_ranks, num_microbatches):
    schedule = generate("1f1b", Placement.straight(num_ranks), num_microbatches)
    timeline = simulate(schedule, CostModel.unit(num_ranks))
    assert timeline.step_s == 3 * (num_microbatches + num_ranks - 1)
    assert timeline.live_microbatches == tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))


@given(st.integers(1, 8), st.integers(1, 24))
def test_gpipe_takes_its_formula_of_time_and_memory(num_ranks, num_microbatches):
    timeline = simulate(generate("gpipe", Placement.straight(num_ranks), num_microbatches), CostModel.unit(num_ranks))
    assert timeline.step_s == 3 * (num_microbatches + num_ranks - 1)
    assert set(timeline.live_microbatches) == {num_microbatches}


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 6))
def test_interleaved_shortens_the_fill_by_its_chunks(num_ranks, chunks, rounds):
    num_microbatches = rounds * num_ranks
    schedule = generate("interleaved", Placement.interleaved(num_ranks, chunks), num_microbatches)
    timeline = simulate(schedule, CostModel.unit(num_ranks * chunks))
    assert timeline.step_s == 3 * (num_microbatches * chunks + num_ranks - 1)


@pytest.mark.parametrize(
    ("kind", "placement", "num_microbatches", "message"),
    [
        ("1f1b", Placement.fold(4), 8, r"schedule=1f1b: it needs placement=straight .* legs 'du'; choose"),
        ("interleaved", Placement.straight(4), 8, r"schedule=interleaved: .* choose pipeline.chunks_per_rank"),
        ("interleaved", Placement.fold(4), 8, r"schedule=interleaved: it needs an interleaved placement"),
        ("1f1b", Placement.straight(4), 0, r"pipeline.microbatches=0: a step has at least 1"),
        ("2f2b", Placement.straight(4), 8, r"pipeline.schedule=2f2b: not known; choose one of gpipe, 1f1b"),
    ],
)
def test_errors_name_the_field_and_the_remedy(kind, placement, num_microbatches, message):
    with pytest.raises(ValueError, match=message):
        generate(kind, placement, num_microbatches)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"search_seconds": -0.1}, "pipeline.search_seconds=-0.1: give seconds of at least 0"),
        ({"search_seconds": math.inf}, "pipeline.search_seconds=inf"),
        ({"search_seconds": math.nan}, "pipeline.search_seconds=nan"),
        ({"memory_cap_bytes": -1.0}, "pipeline.memory_cap_bytes=-1: give bytes of at least 0"),
        ({"memory_cap_bytes": math.inf}, "pipeline.memory_cap_bytes=inf"),
        ({"launch_together": 2}, "pipeline.launch_together=2: schedule=1f1b has no rounds; choose 0 or"),
    ],
)
def test_options_out_of_range_are_refused(more, said):
    with pytest.raises(ValueError) as caught:
        generate("1f1b", Placement.straight(2), 4, **more)
    assert said in str(caught.value)
    assert generate("1f1b", Placement.straight(2), 4, search_seconds=0.0, memory_cap_bytes=0.0, launch_together=0)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match=r"costs.stages: costs of 4 virtual stages, the placement has 8"):
        generate("zbv", Placement.fold(4), 8, costs=CostModel.unit(4))


def test_a_fixed_schedule_over_the_memory_cap_is_refused():
    generate("1f1b", Placement.straight(4), 8, memory_cap_bytes=4.0)
    with pytest.raises(ScheduleError, match=r"rank 0 would hold 4 bytes .* memory_cap_bytes=3; raise it") as error:
        generate("1f1b", Placement.straight(4), 8, memory_cap_bytes=3.0)
    assert (error.value.rank, error.value.index) == (0, 3)
    assert "0F3 <-- ERROR HERE" in str(error.value)


@settings(max_examples=15)
@given(schedules(kinds=("auto",)), st.integers(0, 3))
def test_auto_keeps_to_its_memory_cap(schedule, spare):
    placement = schedule.placement
    costs = CostModel.unit(placement.num_stages)
    cap = float(len(placement.legs) * placement.num_ranks + spare)
    capped = generate("auto", placement, schedule.num_microbatches, costs=costs, memory_cap_bytes=cap, search_seconds=0)
    validate(capped, costs=costs, memory_cap_bytes=cap)
    assert max(simulate(capped, costs).peak_bytes) <= cap
