"""Micro-batches that are moved away from a slow replica: how many, and that training stays what it was."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.planning.adapted import STEPS, train_moved
from tests.engine.planning.test_adaptation import adaptive, request_of
from weft.engine.planning.deviation import Deviation
from weft.engine.planning.replanning import LEAST_GAIN, alike, propose, schedule_for, shares
from weft.pipeline.costs import CostModel
from weft.pipeline.lowering import reduce_in_order, reduction_order
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate
from weft.tools.ranks import run_ranks

PACES = st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 4.0)), min_size=1, max_size=3)
SLOW = (2.0, 2.0, 2.0)


def slowest_s(counts, paces):
    return max(start_s + count * pace_s for count, (start_s, pace_s) in zip(counts, paces, strict=True))


@settings(deadline=None)
@given(PACES, st.integers(1, 5))
def test_no_other_shares_have_a_shorter_slowest_step(paces, count):
    found = shares(count, paces)
    possible = product(range(1, 2 * count + 1), repeat=len(paces))
    best_s = min(slowest_s(each, paces) for each in possible if sum(each) == count * len(paces))
    assert sum(found) == count * len(paces) and all(1 <= each <= 2 * count for each in found)
    assert slowest_s(found, paces) == best_s


@given(st.integers(1, 50), st.integers(1, 20), st.floats(0.1, 4.0))
def test_equal_replicas_keep_equal_shares(count, replicas, pace_s):
    assert shares(count, [(1.0, pace_s)] * replicas) == (count,) * replicas


def costs_of(factors):
    unit = CostModel.unit(2)
    return [
        replace(unit, stages=tuple(replace(stage, forward_s=factor) for stage in unit.stages)) for factor in factors
    ]


@given(st.lists(st.floats(1.0, 1.2), min_size=1, max_size=6))
def test_replicas_within_the_tolerance_count_as_equal(factors):
    found = alike(costs_of(factors), Placement.straight(2))
    assert set(found) == {costs_of([max(factors)])[0]}


def test_replicas_beyond_the_tolerance_keep_their_own_costs():
    assert alike(costs_of([3.0, 1.0, 1.1]), Placement.straight(2)) == tuple(costs_of([3.0, 1.1, 1.1]))


@pytest.mark.parametrize(("placement", "ranks"), [("straight", 2), ("fold", 2), ("interleaved", 2), ("straight", 1)])
def test_a_slow_replica_gives_micro_batches_away_and_takes_them_back(placement, ranks):
    request = request_of(SLOW, replicas=3, cap=6.0, placement=placement, ranks=ranks)
    found = propose(request)
    levels = {level.name: level for level in found.levels}
    assert found.chosen == "microbatches" and found.counts[0] < 6 < found.counts[1] and sum(found.counts) == 18
    assert levels["microbatches"].step_s <= (1 - LEAST_GAIN) * levels["schedule"].step_s
    assert levels["microbatches"].step_s >= levels["evict"].step_s
    assert f"chosen; replicas read {', '.join(map(str, found.counts))}" in found.text()
    for count, costs in zip(found.counts, request.measured, strict=True):
        schedule = schedule_for(found.schedules, count)
        assert simulate(schedule, costs).step_s <= found.step_s()
        assert peak_bytes(schedule, costs) <= request.config.memory_cap_bytes
    assert len({reduction_order(schedule) for schedule in found.schedules}) == 1

    again = replace(request, schedules=found.schedules, counts=found.counts)
    assert propose(again).chosen == "none"
    recovered = propose(replace(again, measured=request.usual))
    assert recovered.chosen == "microbatches" and recovered.counts == request.counts


def test_replicas_that_are_all_as_slow_keep_theirs():
    request = request_of(SLOW, replicas=3)
    found = propose(replace(request, measured=request.measured[:1] * 3))
    assert found.counts == request.counts and found.chosen != "microbatches"
    assert "none to move" in found.text()


def test_an_obstacle_is_named_and_nothing_is_moved():
    found = propose(request_of(SLOW, replicas=2, obstacle="no deal"))
    assert found.chosen != "microbatches" and found.counts == (6, 6)
    assert "replicas read 4, 8; not carried out: no deal" in found.text()


@pytest.mark.parametrize("placement", ["fold", "interleaved"])
def test_a_schedule_can_follow_another_reduction_order(placement):
    request = request_of(SLOW, placement=placement, cap=8.0)
    (schedule,), (costs,) = request.schedules, request.measured
    order = tuple(stages[::-1] for stages in reduction_order(schedule))
    other = reduce_in_order(schedule, order)
    validate(other, costs=costs)
    assert reduction_order(other) == order
    assert reduce_in_order(other, order) == other
    assert reduction_order(reduce_in_order(other, reduction_order(schedule))) == reduction_order(schedule)


def test_a_slow_replica_is_named_although_another_becomes_faster():
    watch = Deviation(num_stages=2, steps=5, interval=1, replicas=2)
    usual, changed = [0.02] * 12 + [0.0], [0.01] * 6 + [0.04] * 6 + [0.0]
    for step in range(10):
        assert not watch.observe(step, usual)
    assert [watch.observe(step, changed) for step in range(10, 15)] == [False] * 4 + [True]
    ratios = {f"stage {s} of replica {r}": (0.5, 2.0)[r] for r in range(2) for s in range(2)}
    assert watch.changes() == pytest.approx(ratios)
    assert watch.of_replica(changed, 1) == (0.04,) * 6 + (0.0,)


@pytest.mark.parametrize(("odd", "factor"), [(1, 1.5), (0, 0.5)])
def test_a_replica_that_deviates_from_the_others_from_the_start_causes_one_plan(odd, factor):
    watch = Deviation(num_stages=2, steps=5, interval=1, replicas=3)
    window = [0.01 * (factor if replica == odd else 1.0) for replica in range(3) for _ in range(6)]
    planned = []
    for step in range(60):
        if watch.observe(step, [*window, 0.0]):
            planned.append(step)
            assert watch.changes() == pytest.approx({f"stage {s} of replica {odd}": factor for s in range(2)})
            watch.planned(step)
    assert planned == [10]


def test_the_faster_one_of_two_replicas_counts_as_usual():
    watch = Deviation(num_stages=1, steps=5, interval=1, replicas=2)
    found = [watch.observe(step, [0.03] * 3 + [0.02] * 3 + [0.0]) for step in range(11)]
    assert found[-1] and watch.changes() == {"stage 0 of replica 0": pytest.approx(1.5)}
    assert watch.of_replica(watch.reference, 0) == (0.02,) * 3 + (0.0,)


@given(st.lists(st.floats(0.92, 1.08), min_size=5, max_size=5), st.integers(0, 2**32))
def test_replicas_that_differ_within_the_tolerance_cause_no_plan(factors, seed):
    random, watch = Random(seed), Deviation(num_stages=1, steps=5, interval=1, replicas=5)
    for step in range(100):
        noise = [random.uniform(0.98, 1.02) for _ in factors]
        window = [0.01 * factor * each for factor, each in zip(factors, noise, strict=True) for _ in range(3)]
        assert not watch.observe(step, [*window, 0.0])


@pytest.fixture(scope="module", params=[1, 2], ids="stages={}".format)
def ranks(request, tmp_path_factory):
    """Results of the ranks of two replicas: of a run with a slow one, and of its last steps with equal numbers."""
    config = adaptive(stages=request.param, zero=1)
    config.model.overrides["attention_dropout"] = 0.1
    return run_ranks(2 * request.param, train_moved, config, str(tmp_path_factory.mktemp("moved")), timeout_s=200)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_moved_micro_batches_change_neither_losses_nor_the_position_in_the_data(ranks):
    """The position is read from a checkpoint that was written between steps with moved micro-batches."""
    for moved, resumed in ranks:
        ((chosen, counts, _),) = moved["made"]
        assert chosen == "microbatches" and counts[0] < 4 < counts[1]
        assert moved["counts"][0] == () and moved["counts"][-4:] == [counts] * 4 and resumed["counts"] == [()] * 3
        assert moved["losses"][-3:] == pytest.approx(resumed["losses"], abs=1e-6)
        assert moved["consumed"] == [(step + 1) * 16 for step in range(STEPS)]
        assert moved["consumed"][-3:] == resumed["consumed"]
    assert len({str(moved["counts"]) for moved, _ in ranks}) == 1


@pytest.mark.slow
def test_the_plan_s_file_has_the_rows_that_each_replica_runs(ranks):
    culprit = pytest.importorskip("weft.engine.supervision.driver.culprit", reason="needs the feature supervision")
    for moved, _ in ranks:
        (text,) = moved["files"]
        assert culprit.read_rows(text).row(moved["rank"]) == moved["row"]


@pytest.mark.slow
def test_replicas_run_and_predict_schedules_of_their_own_numbers(ranks):
    for moved, _ in ranks:
        ((_, counts, step_s),) = moved["made"]
        own = counts[moved["replica"]]
        assert moved["numbers"][-1] == (own, own if moved["holds_loss"] else 0)
        assert moved["predicted"][-1] == step_s != moved["predicted"][0]
