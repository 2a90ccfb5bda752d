"""A driver that is started again continues from its journal."""

from tests.engine.supervision.driver.fake_agents import HOSTS, World
from weft.engine.supervision.driver.fleet import CONNECT_S
from weft.engine.supervision.driver.state import Stage


def test_a_driver_that_is_started_again_goes_on_where_the_journal_ends():
    world = World().train()
    again = World(past=world.journal)
    again.job.attach(again.now)
    assert again.job.attempt == 1 and not again.started
    again.connect()
    assert again.told["a", 1].run and again.told["a", 1].attempt == 1
    again.report("a", step=5)
    again.report("b", step=5)
    assert again.job.stage is Stage.running and len(again.events("good_step")) == 1
    again.kill(2)
    again.settle()
    assert again.events("fault")
    again.stop_all()
    assert again.job.attempt == 2


def test_a_driver_that_is_started_again_counts_what_was_before():
    world = World().train()
    for _ in range(2):
        world.lose(1, step=7)
        world.stop_all()
        for host in HOSTS:
            world.report(host)
    again = World(past=world.journal)
    again.job.attach(again.now)
    again.connect()
    again.kill(1, step=7)
    again.settle()
    assert again.job.code == 1


def test_a_driver_that_is_started_again_misses_a_host_that_has_gone_meanwhile():
    world = World().train()
    again = World(past=world.journal, silence_s=5.0)
    again.job.attach(again.now)
    again.connect("a")
    again.pass_time(4.0, "a")
    assert not again.events("fault")
    again.pass_time(CONNECT_S, "a")
    assert again.events("fault")[0]["culprit"] == {"host": "b"}


def test_a_new_launch_begins_anew_with_unused_numbers():
    world = World().train()
    world.job.end(130, "stopped")
    again = World(past=world.journal)
    again.job.launch(again.now)
    assert again.job.attempt == 2 and again.events("attempt")[-1]["reason"] == "start"
    assert again.started == [("a", 2), ("b", 2)]
