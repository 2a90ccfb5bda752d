"""The search for segment plans, against all plans, the paper's recurrence and simple orders."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from tests.pipeline.strands.orders import backward_then_forward, round_robin
from tests.pipeline.strands.pairs import BETWEEN, INSIDE, llama_layer, num_switches, over, pairs, shortest, tables
from tests.pipeline.strands.recurrence import pair_operators
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.search import search, search_stages
from weft.pipeline.strands.segments import Segment, StageStrands, Strand, StrandPair, WeightGradient


@given(pair=pairs())
@settings(max_examples=60)
def test_the_search_finds_the_best_of_all_plans(pair):
    table = OverlapTable()
    plan = search(pair, table, width=1000)
    plan.check(pair)
    assert plan.seconds(pair, table) == approx(shortest(pair, table), rel=1e-9, abs=1e-12)


@given(pair=pairs(), handover_s=st.sampled_from([0.05, 0.3, 2.0]))
@settings(max_examples=60)
def test_it_does_so_where_hand_overs_take_time(pair, handover_s):
    table = OverlapTable()
    found = search(pair, table, handover_s=handover_s, width=1000).seconds(pair, table, handover_s)
    assert found == approx(shortest(pair, table, handover_s), rel=1e-9, abs=1e-12)


def test_a_hand_over_that_costs_more_than_it_hides_is_left_out():
    pair, table = llama_layer(0.01).repeated(2), OverlapTable()
    assert num_switches(search(pair, table, handover_s=1e-4)) > 2
    assert num_switches(search(pair, table, handover_s=1.0)) == 1


@given(pair=pairs(), table=tables)
@settings(max_examples=40)
def test_where_overlap_slows_down_the_search_is_at_most_a_hundredth_off(pair, table):
    """A way may wait for another only if waiting costs nothing, which slowed collectives make an approximation."""
    found = search(pair, table, width=1000).seconds(pair, table)
    assert found <= shortest(pair, table) * 1.01 + 1e-9


@given(pair=pairs(most=5, most_weights=4), table=tables)
def test_no_plan_beats_what_has_to_be_computed_and_no_order_the_search(pair, table):
    found = search(pair, table).seconds(pair, table)
    longest = max(pair.compute_s, pair.forward.compute_s + pair.forward.comm_s)
    assert longest - 1e-9 <= found
    for order in (backward_then_forward(pair), round_robin(pair)):
        order.check(pair)
        assert found <= order.seconds(pair, table) + 1e-9


@given(pair=pairs(most=3, most_weights=2))
def test_where_no_collective_queues_the_search_is_no_worse_than_the_papers_recurrence(pair):
    """Where two want one link a barrier may hold one back for a more urgent one, which a segment cannot."""
    table = OverlapTable()
    apart = StrandPair(over(pair.forward, INSIDE), over(pair.backward, BETWEEN), pair.weights)
    paired = pair_operators(apart, table)
    paired.plan.check(apart)
    assert paired.plan.seconds(apart, table) <= paired.seconds + 1e-9, "barriers only delay"
    assert search(apart, table).seconds(apart, table) <= paired.seconds + 1e-9


@pytest.mark.parametrize("comm_s", [0.005, 0.01, 0.02, 0.04])
@pytest.mark.parametrize("oef", [1.0, 0.8])
def test_on_layers_the_orders_come_in_the_papers_order(comm_s, oef):
    """DHelix's figure 11: one strand after the other, then Wavelet's turns, then pairing; then ours."""
    pair, table = llama_layer(comm_s).repeated(2), OverlapTable(default=oef, links=oef)
    simple = [order(pair).hidden(pair, table) for order in (backward_then_forward, round_robin)]
    paired = (pair.sequential_s - pair_operators(pair, table).seconds) / pair.comm_s
    shares = [*simple, paired, search(pair, table).hidden(pair, table)]
    assert all(later >= share - 1e-9 for share, later in pairwise(shares))


@given(pair=pairs(most=4, most_weights=3), table=tables)
def test_the_recurrence_pairs_operators_as_its_equation_says(pair, table):
    """Between everything hidden that can be and nothing hidden at all."""
    seconds = pair_operators(pair, table).seconds
    assert pair.compute_s - 1e-9 <= seconds <= pair.sequential_s + 1e-9


@pytest.mark.parametrize(
    ("oef", "width", "seconds"), [(1.0, 1, 0.485), (1.0, 2, 0.481), (0.8, 1, 0.5432), (0.8, 4, 0.54), (0.8, None, 0.54)]
)
def test_of_several_ways_to_a_place_the_most_promising_are_gone_on_with(oef, width, seconds):
    pair, table = llama_layer().repeated(2), OverlapTable(default=oef, links=oef)
    plan = search(pair, table, **({} if width is None else {"width": width}))
    plan.check(pair)
    assert plan.seconds(pair, table) <= seconds + 1e-9


def even(segments, weights=True):
    """As many segments of both strands, each with a weight gradient after its backward."""
    strand = Strand((Segment(1.0, INSIDE, 1.0),) * segments)
    return StrandPair(strand, strand, tuple(WeightGradient(after, 1.0) for after in range(segments * weights)))


def test_plans_for_many_layers_repeat_what_few_layers_do():
    table, shares = OverlapTable(), []
    for layers in (1, 2, 7, 80):
        pair = llama_layer().repeated(layers)
        stage = StageStrands(((llama_layer(), layers),))
        plan = search_stages(stage, stage, table)
        plan.check(pair)
        shares.append(plan.hidden(pair, table))
        assert shares[-1] > round_robin(pair).hidden(pair, table) + 0.3
    assert shares == sorted(shares)
    assert shares[-1] > 0.95


@given(layer=pairs(most=2, most_weights=1), layers=st.integers(1, 12), table=tables)
@settings(max_examples=10)
def test_any_layers_get_a_plan_that_runs(layer, layers, table):
    pair = layer.repeated(layers)
    stage = StageStrands(((layer, layers),))
    plan = search_stages(stage, stage, table)
    plan.check(pair)
    assert plan.seconds(pair, table) >= pair.compute_s - 1e-9
