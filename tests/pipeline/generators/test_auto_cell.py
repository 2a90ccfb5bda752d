"""`auto` on DP-cells: timed as the simulator does, searched and paired as a whole, compared with Atlas's heuristic."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.pair_costs import scaled
from weft.pipeline.action import Op
from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.generators import generate
from weft.pipeline.generators.auto import generate_auto
from weft.pipeline.generators.auto_greedy import ListScheduler
from weft.pipeline.generators.auto_problem import Problem
from weft.pipeline.generators.auto_rules import atlas, backward_first
from weft.pipeline.generators.auto_search import Search
from weft.pipeline.generators.auto_timing import time_rows
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate


def costs_of(placement, *, transfer=3.0, latency=0.5, pair_bps=float("inf"), pair_scale=1.0):
    stage = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=1.0, output_bytes=1.0)
    wan = LinkCost(latency_s=latency, bandwidth_bps=8 / transfer, pair_bps=pair_bps)
    return CostModel(stages=(stage,) * placement.num_stages, wan=wan, pairs=scaled(pair_scale))


def step_s(cell, costs):
    lowered = add_relays(lower(cell), costs)
    validate(lowered)
    return simulate(lowered, costs).step_s


@settings(max_examples=15, deadline=None)
@given(
    sites=st.sampled_from([(1, 1), (1, 2, 1), (2, 1, 2)]),
    fold=st.booleans(),
    pipelines=st.integers(1, 3),
    microbatches=st.integers(1, 5),
    transfer=st.sampled_from([0.75, 3.0]),
    pair_bps=st.sampled_from([float("inf"), 2.0]),
    pair_scale=st.sampled_from([0.75, 1.0]),
    search_s=st.sampled_from([0.0, 0.01]),
)
def test_rows_of_a_cell_are_timed_as_the_simulator_does(
    sites, fold, pipelines, microbatches, transfer, pair_bps, pair_scale, search_s
):
    single = Placement.site_fold(sites) if fold else Placement.straight(sum(sites), sites)
    placement = replace(single, pipelines=pipelines)
    one = costs_of(single, transfer=transfer, pair_bps=pair_bps, pair_scale=pair_scale)
    costs = one.for_cell(pipelines)
    schedule = generate_auto(placement, microbatches, costs, search_seconds=search_s)
    problem = Problem(placement, microbatches, costs)
    timing = time_rows(problem, problem.rows(schedule.rows))
    assert timing.makespan_s == pytest.approx(step_s(schedule, costs))
    alone = side_by_side(generate_auto(single, microbatches, one, search_seconds=search_s / 2), pipelines)
    assert step_s(schedule, costs) <= step_s(alone, costs) + 1e-6


def test_the_search_improves_a_cell_as_a_whole():
    placement = replace(Placement.site_fold((2, 2)), pipelines=3)
    costs = costs_of(placement.single, transfer=2.0, latency=1.0).for_cell(3)
    problem = Problem(placement, 4, costs)
    scheduler = ListScheduler(problem, backward_first(problem), cap_bytes=4.0)
    scheduler.run()
    rows = Search(problem, scheduler.rows, cap_bytes=4.0).run(2000, 0.0)
    first_s, searched_s = (
        step_s(Schedule("rows", placement, 4, tuple(tuple(map(problem.slot, row)) for row in tried)), costs)
        for tried in (scheduler.rows, rows)
    )
    assert searched_s < first_s
    assert step_s(generate_auto(placement, 4, costs, 4, 0.1), costs) < first_s


def test_pairs_are_formed_in_a_cell():
    placement = replace(Placement.site_fold((2, 2)), pipelines=2)
    costs = costs_of(placement.single, transfer=0.5, latency=0.1, pair_scale=0.7).for_cell(2)
    schedule = generate_auto(placement, 8, costs)
    assert sum(len(slot) == 2 for row in schedule.rows for slot in row) >= 32


@pytest.mark.parametrize(("microbatches", "pipelines"), [(4, 2), (4, 3), (16, 3)])
def test_atlas_heuristic_beats_pipelines_that_do_not_share_and_auto_is_no_slower(microbatches, pipelines):
    """Figure 6: transfers of two forwards or more, and a cell of as many pipelines."""
    single = Placement.straight(4, (1, 2, 1))
    placement = replace(single, pipelines=pipelines)
    one = costs_of(single, transfer=float(pipelines))
    costs = one.for_cell(pipelines)
    problem = Problem(placement, microbatches, costs)
    scheduler = ListScheduler(problem, atlas(problem, defer_weights=False), cap_bytes=4.0)
    scheduler.run()
    rows = tuple(tuple(map(problem.slot, row)) for row in scheduler.rows)
    by_atlas = step_s(Schedule("atlas", placement, microbatches, rows), costs)
    varuna = simulate(lower(generate("1f1b", single, microbatches)), one).step_s
    assert by_atlas < varuna
    assert step_s(generate_auto(placement, microbatches, costs, 4.0), costs) <= by_atlas + 1e-9


def test_by_atlas_rules_3_and_4_no_transfer_waits_and_backwards_come_first():
    class Watched(ListScheduler):
        waited = 0.0
        passed_over = 0

        def _start(self, rank, nodes, now_s):
            (node,) = nodes
            link = self.problem.link[node]
            if link in self.problem.shared:
                self.waited += max(0.0, self._link_free_s[link] - now_s - self.problem.seconds[node])
            if self.problem.op(node) is Op.F:
                self.passed_over += any(self._is_ready_gradient(queue, now_s) for queue in self._rank_queues[rank])
            super()._start(rank, nodes, now_s)

        def _is_ready_gradient(self, queue, now_s):
            count, need = queue.started, queue.remote_need
            node = queue.first_node + count
            if count == problem.num_microbatches or problem.op(node) is not Op.I:
                return False
            start_s = now_s if need < 0 else self._arrival_s[need + count]
            if self.rule.backlog_of_gradients:
                start_s = max(start_s, self._link_has_room_s(node))
            return start_s <= now_s and all(each.started > count for each in queue.needs)

    placement = replace(Placement.straight(4, (1, 2, 1)), pipelines=3)
    problem = Problem(placement, 6, costs_of(placement.single).for_cell(3))
    scheduler = Watched(problem, atlas(problem, defer_weights=True), cap_bytes=8.0)
    scheduler.run()
    assert (scheduler.waited, scheduler.passed_over) == (0.0, 0)
    without = Watched(problem, backward_first(problem), cap_bytes=8.0)
    without.run()
    assert without.waited > 0


def test_a_pair_of_nodes_may_get_less_than_an_uplink():
    """Two transfers from one rank to two others run concurrently where the pair is the narrower."""
    placement = Placement.straight(3, (1, 1, 1))
    slow_uplink = costs_of(placement, transfer=4.0, latency=0.0)
    slow_pairs = replace(slow_uplink, wan=LinkCost(bandwidth_bps=4.0, pair_bps=2.0))
    schedule = lower(generate("1f1b", placement, 8))
    by_uplink, by_pairs = (simulate(schedule, costs) for costs in (slow_uplink, slow_pairs))
    middle = [span for span in by_pairs.spans if span.rank == 1 and ">" in span.lane]
    assert {round(span.end_s - span.start_s, 6) for span in middle} == {4.0}
    for timeline, most in ((by_uplink, 1), (by_pairs, 2)):
        starts = [span for span in timeline.spans if span.rank == 1 and ">" in span.lane]
        overlap = max(sum(a.start_s <= b.start_s < a.end_s for a in starts) for b in starts)
        assert overlap == most
    assert by_pairs.step_s < by_uplink.step_s
