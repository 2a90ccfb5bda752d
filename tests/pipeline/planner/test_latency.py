"""The time of a pipeline: its bound is `auto`'s, its closed form for long runs the simulator's."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.pipeline.cell import add_relays
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_bound import lower_bound_s
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.one_f_one_b import generate_1f1b
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.planner import latency
from weft.pipeline.planner.latency import first_microbatches, latency_bound_s, pipeline_latency
from weft.pipeline.planner.layout import LEGS
from weft.pipeline.simulation import simulate

SECONDS = st.floats(0.1, 3.0)
ALL = tuple(LEGS)


@st.composite
def pipelines(draw, most_ranks=6, arrangements=("straight",)):
    ranks, arrangement = draw(st.integers(1, most_ranks)), draw(st.sampled_from(arrangements))
    cuts = sorted(draw(st.sets(st.integers(1, ranks - 1), max_size=2))) if ranks > 1 else []
    sites = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, ranks], strict=True))
    stages = tuple(
        StageCost(
            forward_s=draw(SECONDS),
            input_s=draw(SECONDS),
            weight_s=draw(SECONDS),
            activation_bytes=1.0,
            weight_saved_bytes=1.0,
            output_bytes=1e6,
        )
        for _ in range(ranks * len(LEGS[arrangement]))
    )
    pairs = []
    for site in range(len(sites) - 1):
        link = LinkCost(latency_s=draw(SECONDS), bandwidth_bps=8e6 / draw(SECONDS), pair_bps=8e6 / draw(SECONDS))
        pairs += [((site, site + 1), link), ((site + 1, site), link)]
    local = LinkCost(latency_s=draw(SECONDS), bandwidth_bps=8e6 / draw(SECONDS)) if draw(st.booleans()) else LinkCost()
    return Placement.named(arrangement, ranks, sites), CostModel(stages=stages, local=local, wan_links=tuple(pairs))


@given(pipelines(arrangements=ALL), st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_the_bound_is_that_of_auto(pipeline, microbatches, cell):
    placement, costs = pipeline
    placement = replace(placement, pipelines=cell)
    known = lower_bound_s(Problem(placement, microbatches, costs.for_cell(cell)))
    assert latency_bound_s(placement, microbatches, costs) == pytest.approx(known)


@given(pipelines(4, ALL), st.integers(1, 8), st.integers(1, 2), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_no_schedule_in_memory_beats_the_bound(pipeline, microbatches, cell, cap):
    placement, costs = pipeline
    placement = replace(placement, pipelines=cell)
    bound_s = latency_bound_s(placement, microbatches, costs, [float(cap)] * placement.single.num_stages)
    found = pipeline_latency(placement, microbatches, costs, float(cap))
    assert found.step_s >= bound_s * (1 - 1e-9)
    assert max(found.peak_bytes) <= cap
    schedule = generate_auto(placement, microbatches, costs.for_cell(cell), float(cap))
    whole = costs.for_cell(cell)
    assert simulate(add_relays(lower(schedule), whole), whole).step_s <= found.step_s * (1 + 1e-9)


@given(pipelines(4), st.integers(0, 60))
@settings(max_examples=40, deadline=None)
def test_the_closed_form_of_1f1b_is_the_simulators(pipeline, more):
    placement, costs = pipeline
    microbatches = first_microbatches(placement.num_ranks) + more
    found = pipeline_latency(placement, microbatches, costs, float("inf"), "1f1b")
    simulated = simulate(generate_1f1b(placement, microbatches), costs)
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.02)


@given(pipelines(4, ALL), st.integers(0, 60), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_the_closed_form_of_auto_is_its_list_schedules(pipeline, more, cell):
    placement, costs = pipeline
    placement = replace(placement, pipelines=cell)
    microbatches = first_microbatches(placement.single.num_stages) + more
    found = pipeline_latency(placement, microbatches, costs, 8.0)
    whole = costs.for_cell(cell)
    bound_s = lower_bound_s(Problem(placement, microbatches, whole))
    schedule = generate_auto(placement, microbatches, whole, 8.0)
    assert bound_s <= found.step_s * 1.02
    assert simulate(add_relays(lower(schedule), whole), whole).step_s <= found.step_s * 1.02


@pytest.mark.parametrize("microbatches", [50, 64, 71])
def test_a_pipeline_repeats_itself_after_what_its_memory_holds(microbatches, monkeypatch):
    """Five micro-batches are on their way at a time, over a pair's narrow link; two ranks."""
    stages = tuple(
        StageCost(forward_s=f, input_s=i, weight_s=w, activation_bytes=1.0, output_bytes=1e6)
        for f, i, w in ((3.0, 3.0, 0.1), (0.1, 0.1, 1.0))
    )
    link = LinkCost(latency_s=2.5, bandwidth_bps=8e7, pair_bps=8e6 / 3)
    costs = CostModel(stages=stages, wan=link)
    counted_on = pipeline_latency(Placement.straight(2, (1, 1)), microbatches, costs, 5.0)
    monkeypatch.setattr(latency, "first_microbatches", lambda _: 100)
    scheduled = pipeline_latency(Placement.straight(2, (1, 1)), microbatches, costs, 5.0)
    assert counted_on.step_s == pytest.approx(scheduled.step_s, rel=0.02)


@pytest.mark.parametrize(
    ("room", "bound_s"),
    [
        # A micro-batch takes 4 s through both stages and back, and W a second after the last.
        (0.5, 4 * 4 + 1),
        (1.0, 4 * 4 + 1),
        (1.9, 4 * 4 + 1),
        # Two at a time: the second rank begins after a second, computes for 12, and sends nothing on.
        (2.0, 13.0),
        (9.0, 13.0),
    ],
)
def test_a_stage_waits_without_room_for_all_that_are_on_their_way(room, bound_s):
    assert latency_bound_s(Placement.straight(2), 4, CostModel.unit(2), [room] * 2) == pytest.approx(bound_s)
    assert latency_bound_s(Placement.straight(2), 4, CostModel.unit(2)) == 13.0


def test_a_rule_that_needs_too_much_memory_gives_way_to_one_that_fits():
    times = ((0.5, 3.0, 0.1, 1.0), (0.5, 1.0, 0.5, 4.0), (0.5, 1.0, 1.0, 8.0))
    stages = tuple(
        StageCost(forward_s=f, input_s=i, weight_s=w, activation_bytes=a, output_bytes=1.0) for f, i, w, a in times
    )
    costs = CostModel(stages=stages, wan=LinkCost(latency_s=0.5, bandwidth_bps=8.0))
    placement = Placement.straight(3, (1, 1, 1))
    fast = pipeline_latency(placement, 12, costs, 16.0)
    slow = pipeline_latency(placement, 12, costs, 16.0, rooms=(10.0, 16.0, 16.0))
    assert not fast.fits((10.0, 16.0, 16.0)) and slow.fits((10.0, 16.0, 16.0)) and fast.step_s < slow.step_s
