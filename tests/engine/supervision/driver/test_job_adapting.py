"""Tests of a driver's decisions about a run whose costs have changed: other settings, or a spare for a slow host."""

import pytest

from tests.engine.supervision.driver.fake_agents import World
from weft.engine.observability.watcher import Phase
from weft.engine.planning.next_attempt import FILE, NextAttempt, read_next_attempt
from weft.engine.supervision.driver.hosts import Layout
from weft.engine.supervision.messages import FaultKind, RankEnd

LAYERS = ("pipeline.layers=[3, 5]",)
CHANGE = NextAttempt(after_step=40, reason="stage 1 takes 2.00 times as long", slow_ranks=(2,), arguments=LAYERS)


class WithSpare(World):
    """A world whose host c takes the place of one that is away."""

    def layouts(self, attempt, away, before):
        left = [host for host in ("a", "b", "c") if host not in away][:2]
        return Layout(dict.fromkeys(left, 2), ("127.0.0.1", 1), ("--x",))


def changed(world, checkpoint="step-00000048"):
    """Ranks have planned a change, and a checkpoint is newer, if it is after step 40."""
    world.following, world.checkpoint = CHANGE, checkpoint
    world.pass_time(3.0, "a", "b")
    return world


def arguments(world):
    return [tuple(event["arguments"]) for event in world.events("attempt")]


@pytest.mark.parametrize("checkpoint", ["", "step-00000040"])
def test_a_change_waits_for_a_checkpoint_that_is_newer_than_its_plan(checkpoint):
    world = changed(World().train(), checkpoint)
    assert len(world.events("attempt")) == 1
    world.checkpoint = "step-00000048"
    world.pass_time(3.0, "a", "b")
    assert not world.told["a", 1].run and world.told["a", 1].drop == [], "ranks leave, and their processes stay"


def test_the_next_attempts_have_the_changed_settings_and_cost_no_restart():
    world = changed(World(max_restarts=1).train())
    world.stop_all()
    assert arguments(world) == [("--x",), ("--x", *LAYERS)] and world.events("attempt")[-1]["reason"] == "adapt"
    assert not world.events("fault") and "stage 1 takes 2.00 times" in world.said[-1]
    world.following = None
    world.pass_time(1.0, "a", "b")
    world.lose(1, step=50)
    world.stop_all()
    assert arguments(world)[-1] == ("--x", *LAYERS), "the restart budget was not used before"


def test_another_driver_goes_on_with_the_changed_settings():
    world = changed(World().train())
    world.stop_all()
    again = World(past=world.journal)
    assert again.job.adapted == LAYERS and again.told == {}
    assert World(past=[*world.journal, {"event": "launch", "at": 0.0}]).job.adapted == ()


def test_other_hosts_train_with_the_settings_of_the_run():
    world = changed(World().train())
    world.stop_all()
    world.following, world.on_deny_list = None, {"b": "by hand"}
    world.pass_time(3.0, "a", "b")
    world.lose(1, step=50)
    world.stop_all()
    assert arguments(world)[-1] == ("--x",) and world.events("attempt")[-1]["reason"] == "shrink"


@pytest.mark.parametrize("kind", [FaultKind.input_error, FaultKind.device_memory])
def test_a_change_with_which_no_step_succeeds_is_undone(kind):
    world = changed(World().train())
    world.following = None
    world.stop_all()
    for host, codes in (("a", {1: 2}), ("b", {})):
        ends = {rank: RankEnd(kind=kind, message="too large", status=2) for rank in codes}
        world.report(host, phase=Phase.setup, codes=codes, ends=ends)
    world.settle()
    world.stop_all()
    assert arguments(world) == [("--x",), ("--x", *LAYERS), ("--x",)]
    assert World(past=world.journal).job.has_undone
    changed(world)
    assert len(arguments(world)) == 3, "no other change is tried"


def test_a_spare_takes_the_place_of_a_slow_host():
    world = changed(WithSpare().train())
    assert world.on_deny_list == {"b": "slow: stage 1 takes 2.00 times as long"}
    world.stop_all()
    assert world.events("attempt")[-1]["slots"] == {"a": 2, "c": 2} and arguments(world)[-1] == ("--x",)


def test_a_slow_host_without_a_spare_keeps_its_ranks():
    assert changed(World().train()).on_deny_list == {}


def test_what_is_not_a_change_is_ignored(tmp_path):
    assert read_next_attempt(tmp_path) is None
    CHANGE.write(tmp_path)
    assert read_next_attempt(tmp_path) == CHANGE
    for text in ("", "{", "[]", '{"NextAttempt":[1]}', '{"NextAttempt":["x",1,2,3]}', "[" * 10**5):
        (tmp_path / FILE).write_text(text)
        assert read_next_attempt(tmp_path) is None
