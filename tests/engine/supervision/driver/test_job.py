"""Tests of a driver's decisions about ranks and attempts, with simulated agents and a simulated clock."""

from unittest.mock import Mock

import pytest

from tests.engine.supervision.driver.fake_agents import HOSTS, World
from tests.engine.supervision.driver.fake_run import rows_of
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.state import Stage
from weft.engine.supervision.messages import (
    AgentMessage,
    DesiredState,
    FaultKind,
    HostReport,
    RankEnd,
    RowProgress,
    to_fields,
)
from weft.pipeline.action import RECEIVES


def test_a_run_without_faults():
    world = World()
    world.job.launch(world.now)
    assert world.started == [("a", 1), ("b", 1)]
    assert world.events("attempt")[0]["ranks"] == {"0": "a", "1": "a", "2": "b", "3": "b"}
    world.connect()
    wanted = world.told["b", 1]
    assert wanted.run and wanted.ranks == [2, 3] and wanted.attempt == 1
    assert wanted.environment == {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    world.report("a", Phase.first_step)
    world.report("b", Phase.steady)
    assert world.job.stage is Stage.starting and not world.events("good_step")
    world.report("a", Phase.steady)
    assert world.job.stage is Stage.running
    assert world.events("good_step") == [{"at": 0.0, "event": "good_step", "attempt": 1, "step": 1}]
    world.report("a", codes={0: 0, 1: 0})
    assert world.job.code is None
    world.report("b", codes={2: 0, 3: 0})
    assert world.job.code == 0 and world.told["a", 1] == DesiredState(end=True)


def test_a_killed_rank_starts_another_attempt_when_all_others_have_ended():
    world = World().train()
    world.lose(3)
    (fault,) = world.events("fault")
    assert fault["culprit"] == {"rank": 3, "host": "b"} and fault["kind"] == "signal" and fault["step"] == 1
    assert not world.told["a", 1].run and not world.told["b", 1].run
    world.report("a", codes={0: -15, 1: None})
    world.report("b", codes={2: -15, 3: -9})
    world.job.tick(world.now)
    assert world.job.attempt == 1, "a rank is still there"
    world.stop_all()
    assert [event["reason"] for event in world.events("attempt")] == ["start", "restart"]
    assert world.told["a", 1].run and world.told["a", 1].attempt == 2
    assert world.started == [("a", 1), ("b", 1)], "agents stay"


def test_survivors_park_for_the_next_attempt_once():
    world = World().train()
    world.lose(3)
    assert world.told["a", 1].drop == [3]
    world.report("a", standby={0: "link", 1: "link"})
    world.report("b", codes={3: -9})
    world.job.tick(world.now)
    assert world.job.attempt == 1, "rank 2 takes part still"
    world.report("b", codes={3: -9}, standby={2: "link"})
    world.job.tick(world.now)
    assert world.job.attempt == 2 and world.told["a", 1].run
    world.lose(3)
    assert world.told["a", 1].drop is None, "no good step since: now all processes are new"


def test_ranks_that_park_though_none_has_ended_are_a_fault():
    world = World().train()
    world.report("a", standby={0: "link rank 0 -> rank 2 is silent"})
    world.settle()
    (fault,) = world.events("fault")
    assert fault["kind"] == "lost_peer" and "is silent" in fault["evidence"]


ROWS = rows_of()
"""Ranks 0 and 2 are a pipeline, 1 and 3 another; each pipeline has a rank on host a and one on b."""


def lose_each_other(world, slot_of):
    """All ranks leave because they have lost a peer, from these slots of step 3."""
    for host in world.layout_hosts:
        world.progress = {rank: RowProgress(3, *at) for rank, at in slot_of.items()}
        ranks = world.told[host, world.generation(host)].ranks
        world.report(host, standby=dict.fromkeys(ranks, "another rank has ended or cannot be reached"))
    world.settle()
    return world.events("fault")[0]


def receive_of_rank(rank, at):
    """Where a rank waits for its n-th receive."""
    row = ROWS.row(rank)
    return [index for index, slot in enumerate(row) if slot[0].op in RECEIVES][at], True


@pytest.mark.parametrize(
    "slots, culprit",
    [
        # The second stages wait for rank 0, which is in its first forward; rank 1 waits for its gradients.
        ({0: (1, True), 1: receive_of_rank(1, 0), 2: receive_of_rank(2, 0), 3: receive_of_rank(3, -1)}, {"rank": 0}),
        # Rank 0 has sent what rank 2 waits for; it is a link between two hosts.
        ({0: receive_of_rank(0, 0), 1: None, 2: receive_of_rank(2, 0), 3: None}, {"link": [0, 2]}),
    ],
)
def test_of_ranks_that_have_lost_each_other_the_one_they_waited_for_is_the_culprit(slots, culprit):
    world = World()
    world.job_rows = ROWS
    world.train()
    end = len(ROWS.row(3)) - 1, True  # in STEP, which needs everybody
    fault = lose_each_other(world, {rank: at or end for rank, at in slots.items()})
    assert fault["kind"] == "lost_peer"
    assert {name: fault["culprit"].get(name) for name in culprit} == culprit
    assert world.told["a", 1].drop == ([culprit["rank"]] if "rank" in culprit else [])


def test_schedule_rows_that_storage_withholds_are_read_later(monkeypatch):
    world, rows = World(), Mock(side_effect=[TimeoutError("storage has not answered"), ROWS])
    monkeypatch.setattr(world, "rows", rows)
    world.train()
    world.report("a")
    assert world.job._detector._watch.rows is ROWS and rows.call_count == 2


def test_ranks_that_cannot_be_distinguished_are_none_of_them_the_culprit():
    world = World()
    world.job_rows = ROWS
    world.train()
    fault = lose_each_other(world, {rank: (len(ROWS.row(rank)), False) for rank in range(4)})
    assert fault["culprit"] == {} and "lost each other" in fault["evidence"]
    assert world.told["a", 1].drop == [], "everybody keeps the process"


def test_ranks_that_lost_those_of_a_host_that_falls_silent_wait_for_its_name():
    world = World(silence_s=5.0).train()
    world.pass_time(2.5, "a")
    world.report("a", standby={0: "lost", 1: "lost"})
    world.settle()
    assert not world.events("fault"), "b has not been heard of for a while"
    while not world.events("fault"):
        world.now += 0.1
        world.report("a", standby={0: "lost", 1: "lost"})
        world.job.tick(world.now)
    assert world.events("fault")[0]["kind"] == "host" and world.events("fault")[0]["culprit"] == {"host": "b"}


def test_without_in_process_restarts_every_process_ends():
    world = World(in_process=False).train()
    world.lose(3)
    assert world.told["a", 1].drop is None and not world.told["a", 1].in_process


def test_the_most_telling_end_is_the_cause_whoever_is_heard_first():
    world = World().train()
    world.kill(0, FaultKind.lost_peer, 1)
    world.job.tick(world.now)
    assert not world.events("fault"), "a lost peer is a consequence: what is the cause may still come"
    world.lose(2)
    assert world.events("fault")[0]["culprit"]["rank"] == 2


@pytest.mark.parametrize(
    ("ranks", "culprit"),
    [
        ((3,), {"rank": 3, "host": "b"}),
        ((2, 3), {"ranks": [2, 3], "hosts": ["b"]}),
        ((0, 3), {"ranks": [0, 3], "hosts": ["a", "b"]}),
        ((3, 99), {"rank": 3, "host": "b"}),
        ((), {"rank": 0, "host": "a"}),
    ],
)
def test_whom_an_error_blames_is_the_culprit_whoever_says_it(ranks, culprit):
    world = World().train()
    world.lose(0, FaultKind.corruption, 1, ranks=ranks)
    assert world.events("fault")[0]["culprit"] == culprit
    assert world.job.stage is Stage.stopping


def test_bad_input_ends_the_run_at_once():
    world = World().train()
    world.lose(1, FaultKind.input_error, 2)
    assert world.job.code == 2 and world.events("end") and len(world.events("attempt")) == 1


@pytest.mark.parametrize("kind, most", [(FaultKind.signal, 3), (FaultKind.host_memory, 2), (FaultKind.bad_numbers, 1)])
def test_the_same_fault_at_the_same_step_ends_the_run(kind, most):
    world = World().train()
    for number in range(most):
        assert world.job.code is None, f"{number} of {most}"
        world.lose(1, kind, -9, step=7)
        if world.job.stage is Stage.stopping:
            world.stop_all()
            for host in HOSTS:
                world.report(host)
    assert world.job.code == 1 and len(world.events("fault")) == most


def test_faults_at_other_steps_go_on_until_the_budget_is_used_up():
    world = World(max_restarts=4).train()
    for step in range(5):
        assert world.job.code is None
        world.lose(1, step=step)
        if world.job.stage is Stage.stopping:
            world.stop_all()
            for host in HOSTS:
                world.report(host)
    assert world.job.code == 1 and "max_restarts=4" in world.events("end")[0]["reason"]


def test_restarts_without_a_good_step_between_wait_longer_each_time():
    world = World(backoff_s=10.0).train()
    waits = []
    for step in range(4):
        world.lose(1, step=step)
        world.stop_all()
        began = world.now
        while world.job.stage is Stage.restarting:
            world.now += 1.0
            for host in HOSTS:
                world.report(host, attempt=world.job.attempt)
            world.job.tick(world.now)
        waits.append(world.now - began)
        for host in HOSTS:
            world.report(host, Phase.setup)
    assert waits == pytest.approx([0.0, 10.0, 20.0, 40.0])


def test_a_stopped_rank_is_a_fault_though_no_rank_has_ended():
    world = World().train()
    for _ in range(30):
        world.now += 0.1
        world.report("a")
        world.report("b", state="T")
        world.job.tick(world.now)
        if world.job.stage is Stage.stopping:
            break
    (fault,) = world.events("fault")
    assert fault["kind"] == "stopped" and fault["culprit"] == {"rank": 2, "host": "b"}


def test_messages_of_another_form_are_refused():
    world = World().train()
    for message in ({}, {"report": {}, "ends": {}, "attempt": 1}, {"report": None, "ends": None, "attempt": None}):
        with pytest.raises(ValueError, match="not of this form"):
            world.job.on_report("a", 1, message, world.now)
    assert world.job.stage is Stage.running


@pytest.mark.parametrize(("code", "kind", "expected"), [(-9, FaultKind.signal, 1), (2, FaultKind.input_error, 2)])
def test_a_run_that_is_not_supervised_ends_with_its_first_fault_and_names_it_once(code, kind, expected):
    world = World(enabled=False).train()
    world.lose(3, kind, code)
    assert world.job.stage is Stage.ended and world.job.code == expected
    (said,) = world.said
    assert "rank 3" in said


def test_a_run_that_is_not_supervised_waits_for_ranks_that_stand_still():
    world = World(enabled=False).train()
    world.now += 10_000.0
    world.job.tick(world.now)
    assert world.job.stage is Stage.running


def test_schedule_rows_are_read_again_after_an_adaptation(monkeypatch):
    world, rows = World(), Mock(side_effect=[ROWS, None])
    monkeypatch.setattr(world, "rows", rows)
    world.train()
    watch = world.job._detector._watch
    for written, expected in ((0, ROWS), (5, None), (5, None)):
        world.written = written
        world.now += 0.5
        world.job.tick(world.now)
        world.report("a")
        assert watch.rows is expected
    assert rows.call_count == 2


def test_a_stall_quotes_the_collective_call_at_which_ranks_differ():
    world = World().train()
    world.calls = "gloo group 3 (ranks 0, 2): all_reduce 3: rank 2 has not called it"
    for _ in range(2000):
        for host in HOSTS:
            world.report(host)
        world.now += 0.5
        world.job.tick(world.now)
        if world.events("fault"):
            break
    (fault,) = world.events("fault")
    assert fault["evidence"].endswith(f"; {world.calls}")
    assert any(world.calls in line for line in world.said)


def test_ranks_that_no_agent_starts_are_a_fault_and_no_error_of_the_driver():
    """A forkserver that was stopped in its imports reports no rank at all."""
    world = World(setup_deadline_s=20.0)
    world.job.launch(world.now)
    world.connect()
    for _ in range(50):
        for host in HOSTS:
            empty = to_fields(AgentMessage(1, False, HostReport(host, ()), {}, {}, {}, 0, []))
            world.job.on_report(host, 1, empty, world.now)
        world.now += 0.5
        world.job.tick(world.now)
    assert world.events("fault")[0]["kind"] == "hung"


def test_an_agent_that_is_killed_three_times_during_the_start_does_not_end_the_run():
    world = World()
    world.job.launch(world.now)
    for generation in range(1, 5):
        world.connect()
        world.report("a", Phase.setup)
        world.report("b", Phase.setup)
        world.job.on_lost("a", world.generation("a"))
        world.job.on_exit("a", world.generation("a"), world.now)
        world.pass_time(1.0)
        world.connect()
        for host in HOSTS:
            world.report(host, codes=dict.fromkeys(range(4), -15))
        world.pass_time(1.0)
        assert world.job.code is None, generation


def test_a_driver_whose_journal_has_lost_an_attempt_begins_another():
    world = World().train()
    world.lose(3)
    world.stop_all()
    assert world.job.attempt == 2
    kept = [event for event in world.journal if event["event"] != "attempt" or event["attempt"] == 1]
    later = World(past=[*kept, {"at": 0.0, "event": "attempt"}])
    later.job.attach(later.now)
    later.connect()
    for host in HOSTS:
        later.report(host, attempt=2)
    later.stop_all()
    later.pass_time(1.0)
    assert later.job.attempt == 3 and later.told["a", 1].run


def test_bad_input_that_a_rank_has_printed_is_not_repeated():
    world = World(enabled=False).train()
    end = RankEnd(kind=FaultKind.input_error, message="data.path=x: gone; give another", status=2)
    world.report("a", codes={0: 2}, ends={0: end}, lines={0: ["weft train: data.path=x: gone; give another"]})
    world.settle()
    assert world.job.code == 2 and not world.said


def test_bad_numbers_that_all_ranks_report_are_blamed_on_no_rank():
    world = World().train()
    world.lose(0, kind=FaultKind.bad_numbers, status=1, step=7)
    (fault,) = world.events("fault")
    assert fault["culprit"] == {} and world.job.code == 1


def test_bad_numbers_of_one_rank_name_its_host_and_how_to_evict_it():
    world = World().train()
    host = world.job._layout.host_of(1)
    world.lose(0, kind=FaultKind.bad_numbers, status=1, step=7, ranks=(1,))
    (fault,) = world.events("fault")
    assert fault["culprit"] == {"rank": 1, "host": host} and world.job.code == 1
    assert f"weft evict {host}" in fault["evidence"]
