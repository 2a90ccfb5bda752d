"""Tests of the durations of pairs of stages: stages as layers, plans for any two of them, equal for all callers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from tests.pipeline.strands.pairs import INSIDE, llama_layer, num_switches, pairs, scaled
from weft.comm.values import decode, encode
from weft.pipeline.action import Action, Op
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate
from weft.pipeline.lowering import as_run
from weft.pipeline.placement import Placement
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts
from weft.pipeline.strands.search import search_stages
from weft.pipeline.strands.segments import Kind, Segment, StageStrands, Strand, StrandPair, WeightGradient

HEAD = StrandPair(Strand((Segment(0.002),)), Strand((Segment(0.003),)), (WeightGradient(0, 0.004),))
LAYER = llama_layer()


@given(parts=st.lists(pairs(most=3), min_size=1, max_size=4))
def test_a_stage_computes_and_communicates_what_its_parts_do(parts):
    whole = StageStrands.of(parts).whole
    assert whole.compute_s == approx(sum(part.compute_s for part in parts))
    assert whole.comm_s == approx(sum(part.comm_s for part in parts))
    assert len(whole.weights) == sum(len(part.weights) for part in parts)


def test_compute_at_a_layers_end_is_one_segment_with_the_next():
    layer = StrandPair(
        Strand((Segment(1.0, INSIDE, 2.0), Segment(3.0, kind=Kind.memory))),
        Strand((Segment(4.0, INSIDE, 2.0), Segment(5.0))),
        (WeightGradient(0, 1.0), WeightGradient(1, 2.0)),
    )
    two = layer.repeated(2)
    assert [part.compute_s for part in two.forward.segments] == [1.0, 4.0, 3.0]
    assert [part.compute_s for part in two.backward.segments] == [4.0, 9.0, 5.0]
    assert two.forward.segments[1].kind is Kind.memory
    # The last layer's backward runs first; what its second segment makes possible waits for the joined one.
    assert [(weight.after, weight.compute_s) for weight in two.weights] == [(0, 1.0), (1, 2.0), (1, 1.0), (2, 2.0)]


@given(
    layers=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    ends=st.tuples(st.booleans(), st.booleans()),
    weights=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_any_two_stages_get_a_plan_that_runs_and_gains(layers, ends, weights):
    stages = [StageStrands(((HEAD, 1),) * head + ((LAYER, count),)) for head, count in zip(ends, layers, strict=True)]
    costs = StrandCosts(tuple(stages))
    plan, pair = costs.plan(0, 1, weights=weights), stages[0].beside(stages[1])
    if not weights:
        pair = replace(pair, weights=())
    plan.check(pair)
    assert costs.scale(0, 1, weights=weights) == approx(plan.seconds(pair, OverlapTable()) / pair.sequential_s)
    assert costs.scale(0, 1, weights=weights) < 0.95


def test_layers_that_differ_are_searched_without_a_period():
    other = replace(LAYER, forward=Strand((*LAYER.forward.segments, Segment(0.01, INSIDE, 0.02))))
    stage = StageStrands.of([LAYER, other] * 4)
    assert stage.layers == 8 and len(stage.runs) == 8
    plan, pair = search_stages(stage, stage, OverlapTable()), stage.beside(stage)
    plan.check(pair)
    assert plan.hidden(pair, OverlapTable()) > 0.9


def test_all_who_know_the_same_find_the_same_plans():
    costs = StrandCosts(
        (StageStrands(((HEAD, 1), (LAYER, 3))), StageStrands(((LAYER, 8),))), OverlapTable(links=0.5), 1e-4
    )
    copy = decode(encode(costs), (StrandCosts,))
    assert copy == costs and hash(copy) == hash(costs)
    for forward, backward in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert copy.plan(forward, backward) == costs.plan(forward, backward)
        assert copy.scale(forward, backward) == costs.scale(forward, backward)


def test_hand_overs_count():
    stage = StageStrands(((LAYER, 2),))
    free, dear = (StrandCosts((stage,), handover_s=s) for s in (0.0, 0.001))
    pair, table = stage.beside(stage), OverlapTable()
    assert 2 < num_switches(dear.plan(0, 0)) <= num_switches(free.plan(0, 0))
    seconds = dear.scale(0, 0) * pair.sequential_s
    assert seconds == approx(dear.plan(0, 0).seconds(pair, table, 0.001))
    assert seconds <= free.plan(0, 0).seconds(pair, table, 0.001) + 1e-9


def test_pieces_become_stages_of_as_many_layers():
    pieces = StrandCosts((StageStrands(((LAYER, 1),)),) * 6)
    assert pieces.joined([0, 2, 6]).stages == (StageStrands(((LAYER, 2),)), StageStrands(((LAYER, 4),)))
    assert pieces.joined([0, 6]).divided(3).stages == (StageStrands(((LAYER, 2),)),) * 3
    with pytest.raises(ValueError, match="stages of 6 layers cannot be divided into 4 parts"):
        pieces.joined([0, 6]).divided(4)


@pytest.mark.parametrize("op", [Op.B, Op.I])
def test_of_pairs_those_stay_that_gain(op):
    """Stage 0 has no collectives, and so has nothing to hide with itself."""
    gains = scaled(1, 0.75).stages[0]
    bare = StageStrands(((StrandPair(Strand((Segment(1.0),)), Strand((Segment(1.0),))), 1),))
    costs = replace(CostModel.unit(2), pairs=StrandCosts((bare, gains)))
    assert costs.pair_scale(0, 0, op) == costs.pair_scale(0, 1, op) == 1.0
    assert costs.pair_scale(1, 0, op) == costs.pair_scale(1, 1, op) == approx(0.75)
    assert costs.least_pair_scale([0]) == 1.0 and costs.least_pair_scale([0, 1]) == approx(0.75)
    both_s = costs.stages[0].seconds(Op.F) + costs.stages[0].seconds(op)
    assert costs.pair_s(Action(Op.F, 1, 1), Action(op, 0, 0)) == approx(0.75 * both_s)


def test_schedules_keep_the_pairs_that_gain():
    placement, gains = Placement.fold(2), scaled(4, 0.75)
    schedule = generate("w", placement, 8)
    bare = StageStrands(((StrandPair(Strand((Segment(1.0),)), Strand((Segment(1.0),))), 1),))
    some = replace(gains, stages=(bare, *gains.stages[1:]))
    kept = {
        name: [
            slot for row in as_run(schedule, replace(CostModel.unit(4), pairs=pairs)).rows for slot in row if slot[1:]
        ]
        for name, pairs in {"all": gains, "some": some, "none": None}.items()
    }
    assert kept["all"] == [slot for row in schedule.rows for slot in row if slot[1:]]
    assert kept["some"] == [slot for slot in kept["all"] if slot[0].stage != 0]
    assert kept["none"] == []


def test_strands_are_joined_where_nothing_is_sent_between_them():
    sent, bare, short = Segment(1.0, INSIDE, 2.0), Segment(3.0), Segment(2.0, kind=Kind.memory)
    some, empty = Strand((sent, bare)), Strand(())
    assert some.then(empty) == empty.then(some) == some and empty.then(empty) == empty
    assert Strand((sent,)).then(Strand((sent,))) == Strand((sent, sent))
    assert some.then(Strand((sent,))) == Strand((sent, replace(sent, compute_s=4.0)))
    assert some.then(Strand((short,))) == Strand((sent, replace(short, compute_s=5.0, kind=Kind.gemm)))
    longer = replace(short, compute_s=7.0)
    assert some.then(Strand((longer,))) == Strand((sent, replace(longer, compute_s=10.0)))
    assert some.continues and not Strand((sent,)).continues and not empty.continues


def test_what_takes_no_time_gains_nothing():
    nothing = StrandPair(Strand((Segment(0.0),)), Strand((Segment(0.0),)))
    assert StrandCosts((StageStrands(((nothing, 2),)),)).scale(0, 0) == 1.0


@pytest.mark.parametrize("runs", [(), ((LAYER, 0),), ((LAYER, 1), (HEAD, 0)), ((HEAD, -1), (LAYER, 1))])
def test_parts_that_do_not_occur_are_no_stage(runs):
    with pytest.raises(ValueError, match="each occurs once or more"):
        StageStrands(runs)
