"""The watch over an attempt, on a clock of its own: it names faults of living ranks, and takes no pause for one."""

import pytest

from tests.engine.supervision.driver.fake_run import FakeRun, rows_of
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.limits import Deadlines
from weft.engine.supervision.messages import LinkReading


def diagnosis_of(run, within_s):
    since = run.now
    run.advance(within_s)
    assert run.found, "no diagnosis in time"
    at, diagnosis = run.found[0]
    assert at - since <= within_s
    return diagnosis


@pytest.fixture
def run():
    made = FakeRun()
    made.begin()
    return made


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_a_stopped_rank_is_named_at_once(run, rank):
    run.stopped = {rank}
    diagnosis = diagnosis_of(run, 2.2)
    assert (diagnosis.kind, diagnosis.culprit) == ("stopped", {"rank": rank, "host": run.host(rank)})
    assert diagnosis.step == min(place.step for place in run.job.progress.values())


@pytest.mark.parametrize("phase", [Phase.imports, Phase.setup, Phase.first_step, Phase.evaluation, Phase.checkpoint])
def test_a_rank_is_named_when_it_is_stopped_in_any_phase(phase):
    run = FakeRun()
    run.enter(phase)
    run.advance(5.0)
    run.stopped = {2}
    assert diagnosis_of(run, 2.2).culprit == {"rank": 2, "host": "h1"}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("computing, kind", [(True, "lock_held"), (False, "blocked")])
def test_a_rank_whose_lock_is_held_is_named(run, rank, computing, kind):
    run.locked, run.computing = {rank}, computing
    diagnosis = diagnosis_of(run, 8.0)
    assert (diagnosis.kind, diagnosis.culprit) == (kind, {"rank": rank, "host": run.host(rank)})
    assert 4.0 <= diagnosis.seconds <= 8.0


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_ticks_and_does_nothing_is_named(run, rank):
    run.job.hung = rank
    diagnosis = diagnosis_of(run, 8.0)
    assert (diagnosis.kind, diagnosis.culprit) == ("hung", {"rank": rank, "host": run.host(rank)})
    assert "step" in diagnosis.evidence and "no rank has made progress" in diagnosis.evidence


def test_a_dead_link_inside_a_site_is_named(run):
    run.job.cut = {frozenset((1, 3))}
    diagnosis = diagnosis_of(run, 8.0)
    assert (diagnosis.kind, diagnosis.culprit) == ("link", {"link": [1, 3]})


def test_a_dead_link_between_sites_has_time_to_heal():
    run = FakeRun(rows_of(sites=(1, 1)))
    run.begin()
    run.job.cut = {frozenset((0, 2))}
    run.advance(20.0)
    assert not run.found
    assert run.watch.stalled_link(run.now).links == ((0, 2),), "though it is known"
    run.job.cut = set()
    run.advance(20.0)
    assert not run.found and run.watch.stalled_link(run.now) is None
    run.job.cut = {frozenset((0, 2))}
    diagnosis = diagnosis_of(run, 33.0)
    assert (diagnosis.kind, diagnosis.culprit) == ("link", {"link": [0, 2]})


def held_up(sites, host_of):
    """A run whose rank 2 does not go on after a receive, which rank 0 has sent."""
    run = FakeRun(rows_of(sites=sites))
    run.host = host_of
    run.begin()
    run.job.deaf = 2
    return run


def test_what_came_through_a_host_s_memory_and_is_not_taken_is_the_receiver_s_fault():
    diagnosis = diagnosis_of(held_up((2,), lambda rank: f"h{rank % 2}"), 8.0)
    assert (diagnosis.kind, diagnosis.culprit) == ("hung", {"rank": 2, "host": "h0"})


def test_between_hosts_of_a_site_it_may_be_the_link():
    diagnosis = diagnosis_of(held_up((2,), lambda rank: f"h{rank // 2}"), 8.0)
    assert (diagnosis.kind, diagnosis.culprit) == ("link", {"link": [0, 2]})


@pytest.mark.parametrize("ready", [True, False])
def test_between_sites_it_is_the_receiver_where_both_ends_have_connections(ready):
    run = held_up((1, 1), lambda rank: f"h{rank // 2}")
    run.links = {
        rank: (LinkReading((rank + 2) % 4, 1, 1, 0, 0, 8 if ready or rank == 0 else 0, 0.03),) for rank in run.ranks
    }
    run.advance(29.0)
    assert not run.found, "a link that is cut has connections for a while"
    diagnosis = diagnosis_of(run, 6.0)
    assert diagnosis.culprit == ({"rank": 2, "host": "h1"} if ready else {"link": [0, 2]})


@pytest.mark.parametrize("rank", range(4))
def test_whom_ranks_have_waited_for_that_lost_their_peers(run, rank):
    run.job.hung = rank
    run.advance(3.0)
    others = [other for other in run.ranks if other != rank]
    report_of = run.report_of
    run.report_of = lambda other: report_of(other)._replace(exit_code=1 if other in others else None)
    run.advance(1.0, stop=False)
    assert [suspect.rank for suspect in run.watch.awaited(others, run.now)] == [rank]
    assert [suspect.rank for suspect in run.watch.awaited(run.ranks, run.now)] == [rank], "it may have left as well"


def test_in_a_cell_counters_tell_which_uplink():
    run = FakeRun(rows_of(sites=(1, 1), cells=((0, 1),)), link_deadline_s=5.0)
    run.begin()
    run.job.cut = {frozenset((1, 3))}
    run.links = {1: (LinkReading(3, 0, 0, 0, 0, 0, 0.1),), 0: (LinkReading(2, 0, 0, 0, 0, 8, 0.1),)}
    assert diagnosis_of(run, 9.0).culprit == {"link": [1, 3]}


def test_before_the_rows_are_known_signs_of_life_tell():
    run = FakeRun(knows_rows=False)
    run.begin()
    run.locked = {3}
    assert diagnosis_of(run, 8.0).culprit == {"rank": 3, "host": "h1"}


def test_before_the_rows_are_known_one_that_is_behind_is_named():
    run = FakeRun(deadlines=Deadlines(least_s=4.0, setup_s=20.0))
    run.enter(Phase.setup)
    run.advance(5.0)
    run.enter(Phase.first_step, 0, 1, 3)
    diagnosis = diagnosis_of(run, 22.0)
    assert (diagnosis.kind, diagnosis.culprit) == ("hung", {"rank": 2, "host": "h1"})
    assert "in setup" in diagnosis.evidence


def test_where_ranks_are_not_distinguished_none_is_named():
    run = FakeRun(deadlines=Deadlines(least_s=4.0, setup_s=20.0))
    run.enter(Phase.setup)
    diagnosis = diagnosis_of(run, 22.0)
    assert (diagnosis.kind, diagnosis.culprit) == ("hung", {})
    assert "ranks 0, 1, 2, 3" in diagnosis.evidence


@pytest.mark.parametrize("phase", [Phase.evaluation, Phase.checkpoint])
def test_who_stands_still_in_a_known_phase_is_named(run, phase):
    for _ in range(2):
        run.idle = True
        run.enter(phase)
        run.advance(4.0)
        run.enter(Phase.steady)
        run.idle = False
        run.advance(5.0)
    run.enter(phase)
    run.job.hung = 1
    since = run.now
    assert diagnosis_of(run, 122.0).culprit == {"rank": 1, "host": "h0"}
    assert run.now - since > 119.0


@pytest.mark.parametrize("phase", [Phase.evaluation, Phase.checkpoint])
@pytest.mark.parametrize("computing, kind", [(True, "lock_held"), (False, "blocked")])
def test_a_rank_whose_lock_is_held_is_named_in_its_first_checkpoint_as_well(run, phase, computing, kind):
    run.locked, run.computing = {1}, computing
    run.enter(phase, 1)
    diagnosis = diagnosis_of(run, 10.0)
    assert (diagnosis.kind, diagnosis.culprit) == (kind, {"rank": 1, "host": "h0"})
    assert diagnosis.seconds >= 8.0


def test_a_rank_that_ended_well_while_others_wait_for_it_is_named(run):
    run.job.hung = 1
    report_of = run.report_of
    run.report_of = lambda rank: report_of(rank)._replace(**({"exit_code": 0, "state": ""} if rank == 1 else {}))
    assert diagnosis_of(run, 8.0).culprit == {"rank": 1, "host": "h0"}


def test_who_is_left_behind_by_others_that_finish_is_named(run):
    run.locked = {2}
    run.advance(1.0)
    run.enter(Phase.finishing, 0, 1, 3)
    assert diagnosis_of(run, 9.0).culprit == {"rank": 2, "host": "h1"}


# -- no faults -------------------------------------------------------------------------------------


def test_slow_starts_raise_no_alarm():
    run = FakeRun()
    for phase, seconds in ((Phase.imports, 100.0), (Phase.setup, 400.0), (Phase.first_step, 300.0)):
        run.enter(phase)
        run.advance(seconds)
    run.watch.rows = run.rows
    run.idle = False
    run.advance(10.0)
    assert not run.found


def test_a_pause_in_the_first_steps_raises_no_alarm():
    run = FakeRun(moves_per_s=60.0)
    run.enter(Phase.first_step)
    run.idle = False
    run.advance(4.0)
    run.enter(Phase.steady)
    run.advance(3.0)
    assert run.job.progress[0].step in (2, 3)
    run.idle = True
    run.advance(20.0)
    run.idle = False
    run.advance(20.0)
    assert not run.found


@pytest.mark.parametrize("phase", [Phase.evaluation, Phase.checkpoint])
def test_a_long_phase_raises_no_alarm(run, phase):
    for seconds in (5.0, 100.0, 5.0, 5.0, 400.0):
        run.idle = True
        run.enter(phase)
        run.advance(seconds)
        run.enter(Phase.steady)
        run.idle = False
        run.advance(5.0)
        assert not run.found


@pytest.mark.parametrize("phase", [Phase.evaluation, Phase.checkpoint])
def test_a_lock_that_is_held_for_a_while_in_a_long_phase_raises_no_alarm(run, phase):
    run.idle = True
    run.enter(phase)
    for _ in range(5):
        run.advance(20.0)
        run.locked = {1}
        run.advance(6.0)
        run.locked = set()
    assert not run.found


def test_without_suspects_nothing_is_due(run):
    assert run.deadlines.silent_s(set()) == run.deadlines.deadline_s(set()) == float("inf")


@pytest.mark.parametrize("phase", [Phase.setup, Phase.first_step, Phase.finishing])
def test_where_a_lock_may_be_held_for_long_no_rank_is_named_for_it(run, phase):
    run.idle = True
    run.enter(phase)
    run.locked = {1}
    run.advance(60.0)
    assert not run.found


def test_an_export_takes_as_long_as_it_takes(run):
    run.idle = True
    run.enter(Phase.finishing)
    run.advance(700.0)
    assert not run.found


def test_pauses_shorter_than_the_least_deadline_raise_no_alarm(run):
    for _ in range(20):
        run.idle = True
        run.advance(2.5)
        run.idle = False
        run.advance(1.0)
    assert not run.found


def test_slow_slots_raise_the_deadline():
    run = FakeRun(moves_per_s=0.5)  # a move every two seconds, by one rank of four
    for phase in (Phase.setup, Phase.first_step):
        run.enter(phase)
        run.advance(3.0)
    run.watch.rows = run.rows
    run.idle = False
    run.advance(1500.0)
    run.enter(Phase.steady)
    run.advance(2500.0)
    assert not run.found and run.deadlines.step_s > 30
    run.idle = True
    run.advance(20.0)  # five times as long as anybody stood still, and a fraction of a step
    assert not run.found


def test_steps_that_drift_raise_no_alarm(run):
    for _ in range(200):
        run.moves_per_s *= 0.97
        run.advance(2.0 + 40.0 / run.moves_per_s)
    assert run.moves_per_s < 1.0 and not run.found


def test_an_outage_that_healed_does_not_make_the_watch_patient():
    run = FakeRun(rows_of(sites=(1, 1)))
    run.begin()
    run.job.cut = {frozenset((0, 2))}
    run.advance(25.0)
    run.job.cut = set()
    run.advance(10.0)
    assert not run.found
    run.job.hung = 1
    assert diagnosis_of(run, 9.0).culprit == {"rank": 1, "host": "h0"}


def test_a_rank_stopped_half_of_the_time_is_no_fault(run):
    for _ in range(100):
        run.stopped = {1}
        run.advance(0.5)
        run.stopped = set()
        run.advance(0.5)
    assert not run.found
    assert run.watch.ranks[1].pauses > 10


def test_one_that_is_stopped_at_every_report_and_runs_in_between_is_no_fault(run):
    for _ in range(100):  # a report comes every second, always while it is stopped
        run.stopped = {1}
        run.advance(0.4)
        run.stopped = set()
        run.advance(0.6)
    assert not run.found


def test_silent_hosts_are_not_taken_for_ranks_that_stand_still(run):
    run.away = {"h1"}
    run.idle = True
    run.advance(60.0)
    assert not run.found


def test_a_driver_that_slept_raises_no_alarm(run):
    run.now += 100.0
    run._report_at = run.now
    assert run.watch.diagnosis(run.now) is None
    run._moved_at = {rank: at + 100.0 for rank, at in run._moved_at.items()}
    run.advance(20.0)
    assert not run.found


def test_what_another_attempt_reports_is_ignored(run):
    run.idle = True
    run.attempt = 0
    run.stopped = {0}
    run.advance(30.0)
    assert not run.found


def test_an_attempt_knows_what_the_one_before_has_learned(run):
    later = FakeRun(deadlines=run.deadlines, attempt=2)
    later.enter(Phase.steady)
    later.watch.rows = later.rows
    later.idle = False
    later.advance(1.0)
    later.job.hung = 2
    assert diagnosis_of(later, 9.0).culprit == {"rank": 2, "host": "h1"}
