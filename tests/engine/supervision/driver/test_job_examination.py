"""Hosts whose ranks keep failing are examined."""

from tests.engine.supervision.driver.fake_agents import HOSTS, World
from weft.engine.supervision.agent.processes import DOCTOR_S
from weft.engine.supervision.driver.state import Stage


def fail_twice(world):
    """Two faults of the same host."""
    world.train()
    for step in (3, 4):
        world.lose(3, step=step)
        world.stop_all(doctor=False)
        if step == 3:
            for host in HOSTS:
                world.report(host)


def test_a_host_that_keeps_on_failing_is_examined_and_goes_on_if_it_is_well():
    world = World()
    fail_twice(world)
    assert world.job.stage is Stage.examining
    assert world.told["b", 1].examine and not world.told["b", 1].run and not world.told["a", 1].examine
    codes = {2: -15, 3: -15}
    world.report("b", codes=codes, examined=1)
    assert world.job.stage is Stage.examining, "that was after another attempt"
    world.report("b", codes=codes, examined=world.job.attempt)
    world.job.tick(world.now)
    assert world.job.attempt == 3 and not world.events("evict")


def test_a_host_that_fails_its_examination_is_left_out():
    world = World()
    fail_twice(world)
    world.report("b", codes={2: -15, 3: -15}, examined=world.job.attempt, failed=["GEMM: wrong bits"])
    world.job.tick(world.now)
    assert world.on_deny_list == {"b": "weft doctor node: GEMM: wrong bits"}
    assert world.events("evict")[0]["reason"] == "weft doctor node: GEMM: wrong bits"
    assert world.job.attempt == 3 and not world.told["b", 1].run and world.told["a", 1].run


def test_an_examination_that_does_not_end_is_one_that_failed():
    world = World()
    fail_twice(world)
    world.now += 2 * DOCTOR_S
    world.report("a", codes={0: -15, 1: -15})
    world.job.tick(world.now)
    assert list(world.on_deny_list) == ["b"] and world.job.attempt == 3


def test_the_only_host_is_not_examined():
    world = World(hosts={"a": 2}).train()
    for step in (3, 4, 5):
        world.lose(1, step=step)
        world.stop_all()
        world.report("a")
    assert world.job.attempt == 4
