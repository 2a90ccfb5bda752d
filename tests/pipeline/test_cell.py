"""DP-cells: the lowering pass that shows a peer's transfers, and what sharing the uplinks is worth."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.pipeline.action import RELAYS, SENDS, Op
from weft.pipeline.cell import add_relays, cell_step_s, pipeline_of, predict, side_by_side, uplink_order
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import ScheduleError
from weft.pipeline.serialization import schedule_from_json, schedule_to_json
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate


def costs(placement, transfer=3.0, latency=0.5):
    stage = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0, output_bytes=1.0)
    wan = LinkCost(latency_s=latency, bandwidth_bps=8 / transfer)
    return CostModel(stages=(stage,) * placement.num_stages, wan=wan)


def cell(placement, kind, pipelines, microbatches, of_one):
    shared = of_one.for_cell(pipelines)
    if kind == "auto":
        made = generate(kind, replace(placement, pipelines=pipelines), microbatches, costs=shared, search_seconds=0.0)
    else:
        made = side_by_side(generate(kind, placement, microbatches), pipelines)
    return add_relays(lower(made), shared), shared


@settings(max_examples=30, deadline=None)
@given(
    sites=st.sampled_from([(1, 1), (1, 2, 1), (2, 2), (1, 1, 1)]),
    fold=st.booleans(),
    kind=st.sampled_from(["gpipe", "1f1b", "auto"]),
    pipelines=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    transfer=st.sampled_from([0.5, 3.0]),
)
def test_every_row_shows_all_that_its_uplink_carries_in_one_order(sites, fold, kind, pipelines, microbatches, transfer):
    fold = fold and kind != "1f1b"
    placement = Placement.site_fold(sites) if fold else Placement.straight(sum(sites), sites)
    lowered, shared = cell(placement, kind, pipelines, microbatches, costs(placement, transfer))
    validate(lowered)
    assert schedule_from_json(schedule_to_json(lowered)) == lowered
    each = placement.num_ranks
    for place in range(each):
        orders = [
            [(action.op.value.replace("RELAY", "SEND"), *action[1:]) for action in uplink_order(lowered, rank)]
            for rank in range(place, lowered.num_ranks, each)
        ]
        assert all(order == orders[0] for order in orders)
    for local_rank in range(pipelines):
        one = pipeline_of(lowered, local_rank)
        validate(one)
        assert not one.ops & RELAYS
    uplinks = {}
    for span in simulate(lowered, shared).spans:
        if span.slot[0].op in SENDS | RELAYS and span.end_s > span.start_s:
            uplinks.setdefault(span.rank, []).append((span.start_s, span.end_s - shared.wan.latency_s))
    for spans in uplinks.values():
        spans.sort()
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("microbatches", [4, 16])
def test_sharing_the_uplinks_beats_the_best_of_those_that_do_not(microbatches):
    placement = Placement.straight(4, (1, 2, 1))
    of_one = costs(placement)
    alone = {
        kind: simulate(lower(generate(kind, placement, microbatches, costs=of_one)), of_one).step_s
        for kind in ("gpipe", "1f1b", "auto")
    }
    shared, of_cell = cell(placement, "auto", 3, microbatches, of_one)
    step_s = simulate(shared, of_cell).step_s
    assert step_s < alone["auto"]
    assert min(alone["gpipe"], alone["1f1b"]) > 1.5 * step_s


def test_a_cell_of_one_is_a_pipeline():
    placement = Placement.straight(3, (1, 2))
    plain = lower(generate("1f1b", placement, 4))
    assert add_relays(side_by_side(plain, 1), costs(placement)) == plain == pipeline_of(plain, 0)


def test_a_relay_in_the_wrong_place_is_refused():
    placement = Placement.straight(2, (1, 1))
    lowered, _ = cell(placement, "1f1b", 2, 2, costs(placement))
    rank, relay = next(
        (rank, slot) for rank, row in enumerate(lowered.rows) for slot in row if slot[0].op is Op.RELAY_F
    )
    rows = [list(row) for row in lowered.rows]
    rows[rank].remove(relay)
    rows[rank + 1].append(relay)
    with pytest.raises(ScheduleError, match="are the ranks in its place in other pipelines"):
        validate(lowered.with_rows(rows))


def test_orders_that_contradict_each_other_are_a_deadlock():
    placement = Placement.straight(2, (1, 1))
    lowered, _ = cell(placement, "1f1b", 2, 1, costs(placement))
    rows = [list(row) for row in lowered.rows]
    for rank in (0, 2):  # both relay before they send
        rows[rank].sort(key=lambda slot: slot[0].op not in RELAYS)
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(lowered.with_rows(rows))


def test_a_relay_is_drawn_where_and_when_the_uplink_carries_it():
    """Each transfer between sites occupies the uplinks of all pipelines for the same time."""
    placement = Placement.straight(4, (1, 2, 1))
    lowered, shared = cell(placement, "1f1b", 3, 4, costs(placement))
    carried = {}
    for span in simulate(lowered, shared).spans:
        for action in span.slot:
            if action.op in SENDS | RELAYS and shared.wan.latency_s < span.end_s - span.start_s:
                key = (action.op.value.replace("RELAY", "SEND"), action.stage, action.microbatch)
                carried.setdefault(key, []).append((span.rank % 4, span.start_s, span.end_s))
    sends = 3 * 4 * 4  # pipelines, micro-batches, and two crossings both ways
    assert len(carried) == sends
    assert all(len(spans) == 3 and len(set(spans)) == 1 for spans in carried.values())


@pytest.mark.parametrize("pipelines", [1, 3])
def test_a_pipelines_prediction_is_its_part_of_the_cells(pipelines):
    placement = Placement.straight(4, (1, 2, 1))
    one = costs(placement)
    lowered, shared = cell(placement, "auto", pipelines, 4, one)
    whole = simulate(lowered, shared)
    for local_rank in range(pipelines):
        part = predict(lowered, one, local_rank)
        assert part.num_ranks == 4
        assert part.busy_s == pytest.approx(whole.busy_s[4 * local_rank : 4 * local_rank + 4])
        assert part.peak_bytes == whole.peak_bytes[4 * local_rank : 4 * local_rank + 4]
        assert {action.stage for span in part.spans for action in span.slot} == set(range(4))
        assert {span.lane for span in part.spans} >= {"compute", "F>1", "B>0"}
    steps_s = [predict(lowered, one, local_rank).step_s for local_rank in range(pipelines)]
    assert max(steps_s) == whole.step_s == cell_step_s(lowered, one)
    assert pipelines == 1 or steps_s[0] < max(steps_s), "the first is not the last to end"


@pytest.mark.parametrize("kind", ["1f1b", "w"])
def test_pipelines_that_do_not_wait_for_each_other_are_each_one_alone(kind):
    """Stage by stage, rank by rank and lane by lane, where links between sites are free."""
    fold = kind == "w"
    placement = Placement.fold(3, sites=(1, 2)) if fold else Placement.straight(3, (1, 2))
    alone = lower(generate(kind, placement, 4))
    unit = CostModel.unit(placement.num_stages, local=LinkCost(latency_s=0.25))
    expected = simulate(alone, unit)
    cell = side_by_side(alone, 3)
    assert cell.placement == replace(placement, pipelines=3) and cell.num_ranks == 9
    validate(cell)
    for local_rank in range(3):
        assert pipeline_of(cell, local_rank) == alone
        found = predict(cell, unit, local_rank)
        assert set(found.spans) == set(expected.spans) and len(found.spans) == len(expected.spans)
        assert (found.num_ranks, found.peak_bytes, found.live_microbatches) == (
            *(3, expected.peak_bytes, expected.live_microbatches),
        )
    assert cell_step_s(cell, unit) == expected.step_s


def test_an_uplink_carries_what_leaves_its_site():
    """A rank in the middle of three sites sends in both directions, ranks of one site send nothing."""
    lowered = lower(generate("1f1b", Placement.straight(4, (1, 2, 1)), 2))
    assert [[str(action) for action in uplink_order(lowered, rank)] for rank in range(4)] == [
        ["0SEND_F0", "0SEND_F1"],
        ["1SEND_B0", "1SEND_B1"],
        ["2SEND_F0", "2SEND_F1"],
        ["3SEND_B0", "3SEND_B1"],
    ]


@pytest.mark.parametrize("pipelines", [1, 2])
def test_links_that_are_shared_already_are_so_for_one_pipeline(pipelines):
    """Costs of one pipeline may say that it has pooled uplinks; of a cell its own pipelines count."""
    placement = Placement.straight(2, (1, 1))
    of_one = replace(costs(placement), wan=replace(costs(placement).wan, sharing=4))
    lowered, shared = cell(placement, "1f1b", pipelines, 3, of_one)
    expected = simulate(lowered, of_one if pipelines == 1 else shared)
    found = [predict(lowered, of_one, local_rank) for local_rank in range(pipelines)]
    assert max(one.step_s for one in found) == expected.step_s == cell_step_s(lowered, of_one)
    assert sum(len(one.spans) for one in found) == len(
        [span for span in expected.spans if span.slot[0].op not in RELAYS]
    )
    assert all(one.num_ranks == 2 for one in found)
