"""Alerts name slow ranks, and not what is uneven, noisy or slower for all."""

import pytest

from tests.engine.supervision.driver.fake_run import FakeRun, rows_of
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.alerts import REPEAT_S
from weft.engine.supervision.messages import LinkReading


@pytest.fixture
def run():
    made = FakeRun(moves_per_s=150.0)
    made.begin(60.0)
    return made


def kinds(run):
    return [(alert.kind, alert.culprit) for alert in run.raised]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_becomes_slower_is_reported_once(run, rank):
    run.slowed = {rank: 1.4}
    run.advance(60.0)
    assert kinds(run) == [("straggler", {"rank": rank, "host": run.host(rank)})]
    assert "and took 1.0" in run.raised[0].evidence
    assert not run.found


def test_one_that_is_slow_from_the_beginning_is_reported_by_its_replicas():
    run = FakeRun(rows_of(replicas=3), moves_per_s=200.0)
    run.slowed = {4: 2.0}
    run.begin(80.0)
    assert kinds(run) == [("straggler", {"rank": 4, "host": run.host(4)})]
    assert "its replicas'" in run.raised[0].evidence


PLANNED = (1.0, 3.0, 1.0, 0.5)


@pytest.mark.parametrize("slow, factor", [(0, 2.0), (1, 1.8), (3, 1.7), (None, 1.0)])
def test_one_without_replicas_that_is_slow_from_the_beginning_is_reported_by_the_plan(slow, factor):
    run = FakeRun(rows_of(sites=(4,), replicas=1, busy_s=PLANNED), moves_per_s=200.0)
    run.slowed = {rank: seconds * (factor if rank == slow else 1.0) for rank, seconds in enumerate(PLANNED)}
    run.begin(80.0)
    told = [] if slow is None else [("straggler", {"rank": slow, "host": run.host(slow)})]
    assert kinds(run) == told
    assert slow is None or "alongside the plan" in run.raised[0].evidence


def test_a_plan_that_is_wrong_everywhere_raises_no_alert():
    run = FakeRun(rows_of(sites=(4,), replicas=1, busy_s=(5.0, 7.0, 5.0, 8.0)), moves_per_s=200.0)
    run.begin(80.0)
    assert not run.raised


def test_steps_that_take_longer_for_everyone_raise_no_alert(run):
    for percent in range(100, 300, 5):
        run.slowed = dict.fromkeys(run.ranks, percent / 100)
        run.advance(5.0)
    assert not run.raised


def test_steps_of_uneven_length_raise_no_alert(run):
    run.uneven = 0.6
    run.advance(60.0)
    assert not run.raised


def test_uneven_replicas_raise_no_alert():
    run = FakeRun(moves_per_s=150.0)
    run.slowed = {0: 0.8, 1: 1.1, 2: 0.9, 3: 1.25}
    run.begin(60.0)
    assert not run.raised


def test_a_short_pause_raises_no_alert(run):
    run.slowed = {1: 20.0}
    run.advance(1.0)
    run.slowed = {}
    run.advance(60.0)
    assert not run.raised


def test_a_rank_stopped_now_and_then_is_reported(run):
    for _ in range(20):
        run.stopped = {1}
        run.advance(0.7)
        run.stopped = set()
        run.advance(0.8)
    assert kinds(run) == [("straggler", {"rank": 1, "host": "h0"})] and not run.found
    assert "stopped by a signal" in run.raised[0].evidence


def link_run(speed):
    run = FakeRun(rows_of(sites=(1, 1)), moves_per_s=150.0)
    sent = dict.fromkeys((0, 1), 0)

    def readings(rank):
        sent[rank] += 1_000_000
        return (
            LinkReading(rank + 2, sent[rank], 0, 0, 0, 8, 0.03, round(speed[rank] * run.job.rng.uniform(0.9, 1.0))),
        )

    report_of = run.report_of
    run.report_of = lambda rank: report_of(rank)._replace(links=readings(rank) if rank < 2 else ())
    return run


def test_a_link_that_becomes_slower_is_reported():
    speed = {0: 1e9, 1: 1e9}
    run = link_run(speed)
    run.begin(60.0)
    speed[1] = 1e8
    run.advance(10.0)
    assert kinds(run) == [("slow_link", {"link": [1, 3]})]
    assert "Mbit/s" in run.raised[0].evidence
    run.advance(REPEAT_S - 10.0)
    assert len(run.raised) == 1


def test_one_that_is_slow_again_is_reported_again():
    speed = {0: 1e9, 1: 1e9}
    run = link_run(speed)
    run.begin(60.0)
    for told in range(1, 3):
        speed[0] = 2e8
        run.advance(30.0)
        assert kinds(run) == [("slow_link", {"link": [0, 2]})] * told
        speed[0] = 1e9
        run.advance(REPEAT_S)
    assert len(run.raised) == 2


def test_a_link_that_is_busier_at_times_is_not_slow():
    speed = {0: 1e9, 1: 1e9}
    run = link_run(speed)
    run.begin(60.0)
    for _ in range(40):
        speed[0] = 3e8 if speed[0] == 1e9 else 1e9
        run.advance(2.0)
    assert not run.raised


def test_a_link_that_stands_still_is_reported_before_it_is_a_fault():
    run = FakeRun(rows_of(sites=(1, 1)), moves_per_s=150.0)
    run.begin(60.0)
    run.job.cut = {frozenset((1, 3))}
    run.advance(12.0)
    assert kinds(run) == [("stalled_link", {"link": [1, 3]})] and not run.found


def test_a_disk_that_fills_is_reported_and_again_after_a_while(run):
    run.vitals = {"h0": {"disk_free_bytes": 5 << 30, "disk_bytes": 1 << 40}}
    run.advance(3.0)
    assert not run.raised
    run.idle = True
    run.enter(Phase.finishing)
    for _ in range(int(REPEAT_S) + 10):
        run.vitals = {"h0": {"disk_free_bytes": 80 << 20, "disk_bytes": 1 << 40}, "h1": {}}
        run.advance(1.0)
    assert kinds(run) == [("disk", {"host": "h0"})] * 2


def test_lines_of_logs_are_reported_once(run):
    for _ in range(3):
        run.vitals = {"h1": {"patterns": [[2, "Xid", "NVRM: Xid 79"], [3, "NCCL", "NCCL WARN"]]}}
        run.advance(2.0)
    assert kinds(run) == [("pattern", {"rank": 2, "host": "h1"}), ("pattern", {"rank": 3, "host": "h1"})]


@pytest.mark.parametrize("vitals", [{"patterns": [5, [1], ["a", 2, 3]]}, {"disk_free_bytes": "x", "disk_bytes": None}])
def test_vitals_of_another_form_are_passed_over(run, vitals):
    run.vitals = {"h0": vitals}
    run.advance(3.0)
    assert not run.raised and not run.found


def test_an_evaluation_does_not_look_like_a_slow_link():
    run = link_run({0: 1e9, 1: 1e9})
    run.begin(60.0)
    run.idle = True
    run.enter(Phase.evaluation)
    report_of = run.report_of
    run.report_of = lambda rank: report_of(rank)._replace(links=())
    run.advance(60.0)
    assert not run.raised
