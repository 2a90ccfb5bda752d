"""A run that a signal ends early: every rank saves after the same step, and the run ends only then."""

import signal

import pytest

from tests.engine.supervision.driver.fake_agents import World
from weft.engine.supervision.driver.state import Stage
from weft.engine.supervision.faults import classify
from weft.engine.supervision.messages import FaultKind, RankEnd

SAVED = RankEnd(kind=FaultKind.stopped, message="asked to stop by SIGTERM", status=143)


def stop_ranks(world, host, leaving=False):
    """The ranks of a host have saved and ended."""
    ranks = world.told[host, world.generation(host)].ranks
    world.report(host, codes=dict.fromkeys(ranks, 143), ends=dict.fromkeys(ranks, SAVED), leaving=leaving)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_ends_when_all_ranks_have_saved(number):
    world = World().train()
    world.job.stop(number, 60.0, world.now, memory=False)
    assert world.told["a", 1].run and world.told["a", 1].stop == number
    stop_ranks(world, "a")
    world.pass_time(5.0)
    assert world.job.code is None and not world.events("fault"), "ranks of b are still saving"
    world.checkpoint = "step-00000018"
    stop_ranks(world, "b")
    world.job.tick(world.now)
    assert world.job.code == 128 + number and "resumes from step-00000018" in world.said[-1]


def test_a_stopped_run_ends_by_its_deadline():
    world = World().train()
    world.job.stop(signal.SIGTERM, 60.0, world.now, memory=False)
    for _ in range(14):
        assert world.job.code is None
        stop_ranks(world, "a")
        world.pass_time(4.0, "b")
    stop_ranks(world, "a")
    world.pass_time(4.0, "b")
    assert world.job.code == 143 and "in time" in world.said[-1]


@pytest.mark.parametrize("memory", [False, True])
def test_a_run_between_attempts_begins_another_only_for_steps_in_memory(memory):
    world = World().train()
    world.lose(3)
    assert world.job.stage is Stage.stopping
    world.job.stop(signal.SIGTERM, 60.0, world.now, memory=memory)
    if not memory:
        assert world.job.code == 143
        return
    world.stop_all()
    assert world.job.code is None and world.told["a", 1].run and world.told["a", 1].stop == signal.SIGTERM
    for host in ("a", "b"):
        stop_ranks(world, host)
    world.job.tick(world.now)
    assert world.job.code == 143


def test_a_fault_while_a_run_stops_ends_it():
    world = World().train()
    world.job.stop(signal.SIGTERM, 60.0, world.now, memory=False)
    world.lose(3)
    assert world.job.code == 143 and "after signal" in world.said[-1]


def test_a_run_goes_on_without_a_host_that_was_asked_to_end():
    """A spot instance, or a node that is drained."""
    world = World().train()
    stop_ranks(world, "b", leaving=True)
    stop_ranks(world, "a")
    world.job.tick(world.now)
    world.stop_all()
    assert world.job.code is None and world.job.attempt == 2
    assert world.events("attempt")[-1]["slots"] == {"a": 2}
    assert world.events("fault")[0]["culprit"] == {"hosts": ["b"]}
    assert ("b", 2) not in world.started
    world.pass_time(30.0, "a")
    assert ("b", 2) not in world.started, "the machine has time to go"


def test_a_run_whose_agents_were_all_asked_to_end_ends():
    """Slurm's --signal reaches the steps of a job and not its batch script."""
    world = World().train()
    for host in ("a", "b"):
        stop_ranks(world, host, leaving=True)
    world.job.tick(world.now)
    assert world.job.code == 143


def test_ranks_that_were_asked_to_end_and_not_the_run_start_again():
    world = World().train()
    for host in ("a", "b"):
        stop_ranks(world, host)
    world.job.tick(world.now)
    world.stop_all()
    assert world.job.code is None and world.job.attempt == 2


def test_a_run_that_is_not_supervised_ends_with_ranks_that_were_asked_to_end():
    world = World(enabled=False).train()
    for host in ("a", "b"):
        stop_ranks(world, host)
    world.job.tick(world.now)
    assert world.job.code == 143


def test_another_driver_goes_on_with_stopping():
    world = World().train()
    world.job.stop(signal.SIGTERM, 60.0, world.now, memory=False)
    later = World(past=world.journal)
    later.job.attach(later.now)
    later.connect()
    assert later.told["a", 1].stop == signal.SIGTERM
    for host in ("a", "b"):
        stop_ranks(later, host)
    later.job.tick(later.now)
    assert later.job.code == 143


def test_exit_codes_of_signals_are_requests_to_stop():
    assert classify(143, None) == SAVED
    assert classify(130, None).kind is FaultKind.stopped
    assert classify(-15, None).kind is FaultKind.signal
