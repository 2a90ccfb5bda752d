"""Tests of a driver's decisions about hosts and sites: silent, given up, evicted, back again."""

import pytest

from tests.engine.supervision.driver.fake_agents import HOSTS, World
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.detector import LOOK_S
from weft.engine.supervision.driver.fleet import CONNECT_S, LEAST_CONNECT_S, LONGER
from weft.engine.supervision.driver.job import HOSTS_S
from weft.engine.supervision.driver.state import Stage
from weft.engine.supervision.messages import AgentMessage, DesiredState, HostReport, to_fields


def shrunken():
    """Return a world in which host b is denied and its ranks have ended after a fault."""
    world = World().train()
    world.on_deny_list = {"b": "by hand"}
    world.pass_time(3.0, "a", "b")
    world.lose(1)
    world.stop_all()
    return world


def test_a_silent_host_is_a_fault_of_that_host():
    world = World(silence_s=5.0).train()
    world.pass_time(4.5, "a")
    assert not world.events("fault")
    world.pass_time(1.5, "a")
    assert world.events("fault")[0]["culprit"] == {"host": "b"} and world.events("fault")[0]["kind"] == "host"
    assert world.started[-1] == ("b", 2), "another agent is tried"


def report_of(host):
    """Return the report of an idle agent."""
    return to_fields(AgentMessage(0, True, HostReport(host, ()), {}, {}, {}, 0, []))


FOUR = {"a": 1, "b": 1, "c": 1, "d": 1}
SITES = (["a", "b"], ["c", "d"])


def restart_takes(world, seconds, imports_s=0.0):
    """Come to a good step so long after imports, which take time of their own."""
    world.job.launch(world.now)
    world.now += 0.1
    world.connect()
    for phase, passed_s in ((Phase.imports, imports_s), (Phase.setup, seconds), (Phase.steady, 0.0)):
        for host in world.layout_hosts:
            world.report(host, phase=phase)
        world.now += passed_s


def test_a_site_without_reports_may_be_silent_for_as_long_as_a_restart_takes():
    """A cut of some seconds between sites ends nothing; an alert tells of it."""
    world = World(FOUR, sites=SITES, silence_s=5.0)
    restart_takes(world, 20.0)
    world.pass_time(18.0, "a", "b")
    assert not world.events("fault")
    (alert,) = world.events("alert")
    assert alert["kind"] == "silent_site" and alert["culprit"] == {"hosts": ["c", "d"]}
    assert "20 s to heal" in alert["evidence"]
    world.pass_time(10.0, "a", "b", "c", "d")
    assert not world.events("fault") and world.job.attempt == 1
    world.pass_time(6.0, "a", "b")
    assert len(world.events("alert")) == 2
    world.pass_time(16.0, "a", "b")
    (fault,) = world.events("fault")
    assert fault["kind"] == "host" and fault["culprit"] == {"host": "c"} and "c, d" in fault["evidence"]


@pytest.mark.parametrize("imports_s", [0.0, 60.0])
@pytest.mark.parametrize(("restart_s", "patience_s"), [(1.0, 10.0), (14.0, 14.0), (300.0, 30.0)])
def test_a_silent_site_has_time_within_bounds(restart_s, patience_s, imports_s):
    """Imports are no part of it: ranks that are started again have them from their forkserver."""
    world = World(FOUR, sites=SITES, silence_s=5.0)
    restart_takes(world, restart_s, imports_s)
    world.pass_time(patience_s - 1.0, "a", "b")
    assert not world.events("fault")
    world.pass_time(2.0, "a", "b")
    assert len(world.events("fault")) == 1


def test_a_site_that_is_lost_is_left_out_at_once_and_comes_back_when_it_is_heard():
    world = World(FOUR, sites=SITES, silence_s=5.0)
    restart_takes(world, 3.0)
    world.pass_time(11.0, "a", "b")
    assert [event["host"] for event in world.events("evict")] == ["c", "d"]
    for host in ("a", "b"):
        world.report(host, standby=dict.fromkeys(world.told[host, 1].ranks, "left"))
    world.job.tick(world.now)
    assert world.job.attempt == 2 and world.away_asked[-1] == {"c", "d"}, "nobody waits for agents there"
    world.pass_time(3.0, "a", "b", "c", "d")
    assert [event["host"] for event in world.events("readmit")] == ["c", "d"]
    assert all(generation == 1 for _, generation in world.started)


def test_a_site_that_is_needed_has_all_the_time_that_links_have():
    world = World(FOUR, sites=SITES, silence_s=5.0)
    restart_takes(world, 3.0)
    world.needed = {"c", "d"}
    world.pass_time(29.0, "a", "b")
    assert not world.events("fault")
    world.pass_time(2.0, "a", "b")
    assert len(world.events("fault")) == 1
    for host in ("a", "b"):
        world.report(host, standby=dict.fromkeys(world.told[host, 1].ranks, "left"))
    world.job.tick(world.now)
    assert world.job.stage is Stage.restarting
    for _ in range(20):
        world.now += 0.5
        world.job.tick(world.now)
    assert sum("waiting for hosts" in line for line in world.said) == 1, "it says so once"
    for host in ("c", "d"):
        world.report(host, codes=dict.fromkeys(world.told[host, world.generation(host)].ranks, -15))
    world.now += 2.0
    world.job.tick(world.now)
    assert world.job.attempt == 2


def test_hosts_of_a_site_are_not_heard_again_at_once():
    """After a cut each connection goes on when its own next packet is due."""
    world = World(FOUR, sites=SITES, silence_s=5.0).train()
    world.pass_time(7.0, "a", "b")
    world.pass_time(4.0, "a", "b", "c")
    assert not world.events("fault")
    world.pass_time(4.0, "a", "b", "c")
    assert world.events("fault")[0]["culprit"] == {"host": "d"}


def test_one_silent_host_of_a_site_is_no_matter_of_links():
    world = World(FOUR, sites=SITES, silence_s=5.0).train()
    world.pass_time(6.0, "a", "b", "d")
    (fault,) = world.events("fault")
    assert fault["culprit"] == {"host": "c"} and not world.events("alert")


def test_a_driver_that_was_stopped_itself_blames_no_host_for_the_silence():
    world = World(silence_s=5.0).train()
    world.pass_time(1.0, "a", "b")
    world.now += 60.0
    world.job.tick(world.now)
    world.pass_time(4.0, "a")
    assert not world.events("fault")
    world.pass_time(2.0, "a")
    assert world.events("fault")[0]["culprit"] == {"host": "b"}, "who stays silent is found later"


@pytest.mark.parametrize(("connect_s", "limit_s"), [(0.1, LEAST_CONNECT_S), (2.0, 2.0 * LONGER), (20.0, CONNECT_S)])
def test_a_host_on_which_no_agent_starts_again_is_left_out(connect_s, limit_s):
    world = World()
    world.job.launch(world.now)
    world.now += connect_s
    world.connect()
    for host in HOSTS:
        world.report(host)
    world.pass_time(6.0, "a")
    world.report("a", codes={0: -15, 1: -15})
    until = world.now + limit_s + 1
    while world.now < until:
        world.now += 0.5
        world.report("a", attempt=1, codes={0: -15, 1: -15})
        world.job.tick(world.now)
        if world.job.attempt == 2:
            break
    assert [event["host"] for event in world.events("evict")] == ["b"]
    assert world.now > until - 3.0, "not before an agent has had the time that agents took"
    assert world.told["a", 1].ranks == [0, 1] and world.told["a", 1].run
    assert world.away_asked[-1] == {"b"}
    before = len(world.started)
    for tried in range(2 if limit_s < CONNECT_S else 1):
        since = world.now
        while len(world.started) - before == tried:
            world.pass_time(0.5, "a")
            assert world.now - since <= limit_s + HOSTS_S + 1.0, "it is tried again"
        assert world.now - since >= limit_s - HOSTS_S - 1.0, "an agent has its time to start"
    assert {host for host, _ in world.started[before:]} == {"b"}
    world.job.on_report(*world.started[-1], report_of("b"), world.now)
    world.report("b", ready=False)
    world.pass_time(3.0, "a")
    assert not world.events("readmit"), "nobody waits for imports, nor stops for a host on which they fail"
    world.pass_time(3.0, "a", "b")
    assert [event["host"] for event in world.events("readmit")] == ["b"]


def a_site_is_left_out(world):
    """Two hosts of four go on. Agents start on the others, where older ones may still be alive."""
    restart_takes(world, 3.0)
    world.pass_time(11.0, "a", "b")
    for host in ("a", "b"):
        world.report(host, standby=dict.fromkeys(world.told[host, 1].ranks, "left"))
    world.job.tick(world.now)
    world.pass_time(2 * LEAST_CONNECT_S, "a", "b")
    assert world.job.attempt == 2 and {("c", 2), ("d", 2)} <= set(world.started)


@pytest.mark.parametrize(
    ("first", "anew", "reconnects"),
    [("own", False, False), ("own", False, True), ("own", True, True), ("probe", False, True), ("probe", True, True)],
)
def test_after_a_cut_the_agent_that_is_heard_first_is_the_hosts(first, anew, reconnects):
    """One that has gone on meanwhile need import nothing.

    Args:
        anew: whether the driver has been started again meanwhile.
        reconnects: whether the first comes by a new connection; that of the host's own may have outlived the cut.
    """
    world = World(FOUR, sites=SITES, silence_s=5.0)
    a_site_is_left_out(world)
    if anew:
        world = World(FOUR, sites=SITES, silence_s=5.0, past=world.journal)
        world.job.attach(world.now)
        world.connect("a", "b")
    newest = max([event["generation"] for event in world.events("probe") if event["host"] == "c"])
    chosen, other = (1, newest) if first == "own" else (newest, 1)
    if reconnects:
        world.job.on_connected("c", newest, world.now)
        assert ("c", newest) not in world.told, "it waits for the other"
        world.job.on_connected("c", chosen, world.now)
    world.job.on_report("c", chosen, report_of("c"), world.now)
    assert not world.told["c", chosen].end
    world.told.pop(("c", other), None)
    world.job.on_report("c", other, report_of("c"), world.now)
    assert world.told["c", other] == DesiredState(end=True, replaced=True)
    world.job.on_connected("c", other, world.now)
    assert world.generation("c") == chosen and world.told["c", other] == DesiredState(end=True, replaced=True)
    again = World(FOUR, past=world.journal)
    assert again.generation("c") == chosen, "it is in the journal"
    world.pass_time(3.0, "a", "b", "c")
    assert [event["host"] for event in world.events("readmit")] == ["c"]
    world.job.on_exit("c", chosen, world.now)
    world.job.on_lost("c", chosen)
    world.job.fleet.start_missing(["c"], world.now)
    assert world.started[-1] == ("c", max(newest, 2) + 1), "a number that nobody had"


def driver_killed_before_it_started_an_agent():
    """Return the world of the next driver. The agent of b is in the journal, and was never started."""
    before = World()
    before.job.launch(before.now)
    before.connect("a")
    world = World(past=before.journal)
    world.job.attach(world.now)
    world.connect("a")
    world.report("a", Phase.setup)
    return world


def test_an_agent_that_a_killed_driver_recorded_and_did_not_start_is_started_by_the_next():
    world = driver_killed_before_it_started_an_agent()
    world.pass_time(LEAST_CONNECT_S + 1, "a")
    assert world.started == [("b", 2)], "once"
    world.job.on_report("b", 2, report_of("b"), world.now)
    assert world.told["b", 2].run
    world.pass_time(2 * CONNECT_S, "a", "b")
    assert not world.events("fault") and not world.events("evict") and world.job.stage is Stage.running


def test_an_agent_that_reconnects_slowly_to_the_next_driver_stays():
    world = driver_killed_before_it_started_an_agent()
    world.pass_time(LEAST_CONNECT_S + 1, "a")
    world.connect("b")
    world.report("b")
    world.job.on_report("b", 2, report_of("b"), world.now)
    assert world.told["b", 1].run and world.told["b", 2] == DesiredState(end=True, replaced=True)


def test_a_host_on_which_no_agent_starts_is_a_fault_after_a_driver_was_killed():
    world = driver_killed_before_it_started_an_agent()
    world.pass_time(LEAST_CONNECT_S + CONNECT_S + 2, "a")
    (fault,) = world.events("fault")
    assert fault["culprit"] == {"host": "b"}


def test_ssh_that_ends_because_the_link_is_cut_is_no_end_of_an_agent():
    world = World(FOUR, sites=SITES, silence_s=5.0)
    restart_takes(world, 20.0)
    world.pass_time(7.0, "a", "b")
    for host in ("c", "d"):
        world.job.on_lost(host, 1)
        world.job.on_exit(host, 1, world.now)
    world.pass_time(10.0, "a", "b")
    assert not world.events("fault") and world.events("alert")[0]["kind"] == "silent_site"


def test_an_agent_that_has_ended_is_noticed_at_once_and_started_again():
    world = World().train()
    world.job.on_lost("b", 1)
    world.job.tick(world.now)
    assert not world.events("fault"), "a connection may come back"
    world.job.on_exit("b", 1, world.now)
    world.now += LOOK_S
    world.job.tick(world.now)
    assert world.events("fault")[0]["kind"] == "agent" and world.started[-1] == ("b", 2)
    world.report("a", codes={0: -15, 1: -15})
    world.connect("b")
    world.report("b", attempt=0)
    world.job.tick(world.now)
    assert world.job.attempt == 2 and world.told["b", 2].run


def test_an_agent_of_an_earlier_generation_is_ended():
    world = World().train()
    world.job.on_exit("b", 1, world.now)
    world.job.on_lost("b", 1)
    world.job.tick(world.now)
    world.job.on_connected("b", 1, world.now)
    assert world.told["b", 1] == DesiredState(end=True, replaced=True)
    heard = world.job.fleet.hosts["b"].reported_at
    world.now += 1
    world.job.on_report("b", 1, {}, world.now)
    assert world.job.fleet.hosts["b"].reported_at == heard
    world.job.on_connected("stranger", 5, world.now)
    assert world.told["stranger", 5] == DesiredState(end=True, replaced=True)


def test_a_host_that_is_evicted_goes_with_the_next_attempt_and_comes_back_when_it_is_readmitted():
    world = World().train()
    world.on_deny_list = {"b": "by hand"}
    world.pass_time(3.0, "a", "b")
    assert [event["host"] for event in world.events("evict")] == ["b"] and world.job.attempt == 1
    world.lose(1)
    world.stop_all()
    assert world.told["a", 1].run and not world.told["b", 1].run
    assert world.events("attempt")[-1]["reason"] == "shrink"
    world.report("a")
    world.on_deny_list = {}
    world.checkpoint = "step-00000004"
    world.pass_time(5.0, "a")
    assert [event["host"] for event in world.events("readmit")] == ["b"]
    assert world.job.attempt == 2, "steps since the last checkpoint would be lost"
    world.checkpoint = "step-00000008"
    world.pass_time(3.0, "a")
    assert not world.told["a", 1].run
    world.report("a", codes={0: -15, 1: -15})
    world.job.tick(world.now)
    assert world.told["b", 1].run and world.events("attempt")[-1]["reason"] == "grow"
    assert len(world.events("fault")) == 1


def test_a_run_grows_once_a_memory_checkpoint_has_become_whole():
    world = shrunken()
    world.report("a", kept=4)
    world.on_deny_list = {}
    world.job.tick(world.now + 5.0)
    assert world.told["a", 1].run, "steps since that one would be lost"
    world.report("a", kept=9)
    world.job.tick(world.now + 10.0)
    assert not world.told["a", 1].run


def test_a_smaller_run_goes_on_while_its_hosts_are_denied_or_storage_hangs():
    """It would grow with hosts that return, but no layout is possible now."""
    world = shrunken()
    world.report("a")
    assert world.job.stage is Stage.running and world.job.attempt == 2
    world.on_deny_list["a"] = "by hand"
    world.pass_time(9.0, "a")
    assert world.job.stage is Stage.running and world.told["a", 1].run


def test_without_hosts_the_run_waits():
    world = World(hosts={"a": 2}).train()
    world.on_deny_list = {"a": "by hand"}
    world.lose(1)
    world.stop_all()
    assert world.job.stage is Stage.restarting and any("waiting for hosts" in line for line in world.said)
    world.on_deny_list = {}
    world.now += CONNECT_S
    world.job.tick(world.now)
    assert world.job.attempt == 2


def test_a_run_begins_without_hosts_that_are_denied():
    world = World()
    world.on_deny_list = {"b": "by hand"}
    world.job.launch(world.now)
    assert world.started == [("a", 1)] and world.away_asked == [{"b"}]
    assert world.events("evict")[0]["host"] == "b"
