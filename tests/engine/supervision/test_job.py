"""What a driver decides, with agents that are played and a clock that is set."""

from __future__ import annotations

import pytest

from tests.engine.supervision.fake_run import rows_of
from weft.conf.schema.supervision import SuperviseConfig
from weft.engine.supervision.examination import DOCTOR_S
from weft.engine.supervision.faults import FaultKind, RankEnd
from weft.engine.supervision.fleet import CONNECT_S, LEAST_CONNECT_S, LONGER, PROBE_S
from weft.engine.supervision.job import HOSTS_S, LOOK_S, SETTLE_S, Job, Stage
from weft.engine.supervision.layout import Layout
from weft.engine.supervision.message import AgentMessage
from weft.engine.supervision.places import Phase
from weft.engine.supervision.report import HostReport, RankReport
from weft.pipeline.action import RECEIVES
from weft.pipeline.culprit import Place

HOSTS = {"a": 2, "b": 2}


class World:
    """Hosts with agents that obey, a journal, and a clock."""

    def __init__(self, hosts=HOSTS, past=(), sites=(), **settings):
        self.now = 100.0
        self.journal = list(past)
        self.started = []
        self.told = {}
        self.said = []
        self.away_asked = []
        self.layout_hosts = hosts
        self.on_deny_list = {}
        self.needed = set()
        self.checkpoint = ""
        self.job_rows = None
        self.places = {}
        self.job = Job(
            settings=SuperviseConfig(**settings),
            layouts=self.layouts,
            effects=self,
            target="m:f",
            past=past,
            sites=sites,
        )

    def layouts(self, attempt, away, before):
        self.away_asked.append(set(away))
        left = {host: slots for host, slots in self.layout_hosts.items() if host not in away}
        if not left or self.needed & set(away):
            raise ValueError("too few hosts are left")
        return Layout(left, ("127.0.0.1", 1), ("--x",))

    def start_agent(self, host, generation):
        self.started.append((host, generation))

    def tell(self, host, generation, message):
        self.told[host, generation] = message

    def record(self, event, **fields):
        self.journal.append({"at": 0.0, "event": event, **fields})

    def say(self, text):
        self.said.append(text)

    def rows(self):
        return self.job_rows

    def denied(self):
        return self.on_deny_list

    def deny(self, host, reason):
        self.on_deny_list[host] = reason

    def newest_checkpoint(self):
        return self.checkpoint

    def events(self, name):
        return [event for event in self.journal if event["event"] == name]

    def connect(self, *hosts):
        for host in hosts or self.layout_hosts:
            self.job.on_connected(host, self.generation(host), self.now)

    def generation(self, host):
        return self.job.fleet.hosts[host].generation

    def report(
        self,
        host,
        phase=Phase.steady,
        step=1,
        codes=None,
        ends=None,
        attempt=None,
        state="S",
        parked=None,
        examined=0,
        failed=(),
        kept=0,
    ):
        """The host says that its ranks are there, or have ended."""
        attempt = self.job.attempt if attempt is None else attempt
        ranks = self.told[host, self.generation(host)].get("ranks", [])
        reports = tuple(
            RankReport(
                rank,
                attempt,
                phase,
                self.places.get(rank, Place(step)),
                num_microbatches=4,
                state=state,
                exit_code=(codes or {}).get(rank),
                kept_step=kept,
            )
            for rank in ranks
        )
        message = AgentMessage(
            attempt, HostReport(host, reports), ends or {}, parked or {}, {}, examined, failed
        ).to_wire()
        self.job.on_report(host, self.generation(host), message, self.now)

    def pass_time(self, seconds, *beating):
        """Let time pass, in which some hosts report."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.5, until)
            for host in beating:
                self.report(host)
            self.job.tick(self.now)

    def train(self):
        """Come to a good step from the start."""
        self.job.launch(self.now)
        self.connect()
        for host in self.layout_hosts:
            self.report(host)

    def kill(self, rank, kind=FaultKind.signal, status=-9, step=None, ranks=()):
        """A rank ends badly, and may blame others."""
        host = "a" if rank < 2 else "b"
        end = RankEnd(kind=kind, message=f"rank {rank}: {kind.value}", status=status, step=step, ranks=ranks)
        self.report(host, codes={rank: status}, ends={rank: end})

    def settle(self):
        """The time in which the most telling end may come."""
        self.now += SETTLE_S
        self.job.tick(self.now)

    def stop_all(self, doctor=True):
        """Every agent has ended its ranks, and finds its host well if it has to look."""
        for host in self.layout_hosts:
            ranks = self.told[host, self.generation(host)]["ranks"]
            self.report(host, codes=dict.fromkeys(ranks, -15))
        self.job.tick(self.now)
        if doctor and self.job.stage is Stage.examining:
            for host in self.layout_hosts:
                ranks = self.told[host, self.generation(host)]["ranks"]
                self.report(host, codes=dict.fromkeys(ranks, -15), examined=self.job.attempt)
            self.job.tick(self.now)


def test_a_run_without_faults():
    world = World()
    world.job.launch(world.now)
    assert world.started == [("a", 1), ("b", 1)]
    assert world.events("attempt")[0]["ranks"] == {"0": "a", "1": "a", "2": "b", "3": "b"}
    world.connect()
    wanted = world.told["b", 1]
    assert wanted["run"] and wanted["ranks"] == [2, 3] and wanted["attempt"] == 1
    assert wanted["environment"] == {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    world.report("a", Phase.first_step)
    world.report("b", Phase.steady)
    assert world.job.stage is Stage.starting and not world.events("good_step")
    world.report("a", Phase.steady)
    assert world.job.stage is Stage.running
    assert world.events("good_step") == [{"at": 0.0, "event": "good_step", "attempt": 1, "step": 1}]
    world.report("a", codes={0: 0, 1: 0})
    assert world.job.code is None
    world.report("b", codes={2: 0, 3: 0})
    assert world.job.code == 0 and world.told["a", 1] == {"end": True}


def test_a_killed_rank_starts_another_attempt_when_all_others_have_ended():
    world = World()
    world.train()
    world.kill(3)
    world.settle()
    (fault,) = world.events("fault")
    assert fault["culprit"] == {"rank": 3, "host": "b"} and fault["kind"] == "signal" and fault["step"] == 1
    assert not world.told["a", 1]["run"] and not world.told["b", 1]["run"]
    world.report("a", codes={0: -15, 1: None})
    world.report("b", codes={2: -15, 3: -9})
    world.job.tick(world.now)
    assert world.job.attempt == 1, "a rank is still there"
    world.stop_all()
    assert [event["reason"] for event in world.events("attempt")] == ["start", "restart"]
    assert world.told["a", 1]["run"] and world.told["a", 1]["attempt"] == 2
    assert world.started == [("a", 1), ("b", 1)], "agents stay"


def test_survivors_park_for_the_next_attempt_once():
    world = World()
    world.train()
    world.kill(3)
    world.settle()
    assert world.told["a", 1]["drop"] == [3]
    world.report("a", parked={0: "link", 1: "link"})
    world.report("b", codes={3: -9})
    world.job.tick(world.now)
    assert world.job.attempt == 1, "rank 2 takes part still"
    world.report("b", codes={3: -9}, parked={2: "link"})
    world.job.tick(world.now)
    assert world.job.attempt == 2 and world.told["a", 1]["run"]
    world.kill(3)
    world.settle()
    assert world.told["a", 1]["drop"] is None, "no good step since: now all processes are new"


def test_ranks_that_park_though_none_has_ended_are_a_fault():
    world = World()
    world.train()
    world.report("a", parked={0: "link rank 0 -> rank 2 is silent"})
    world.settle()
    (fault,) = world.events("fault")
    assert fault["kind"] == "lost_peer" and "is silent" in fault["evidence"]


ROWS = rows_of()
"""Ranks 0 and 2 are a pipeline, 1 and 3 another; each pipeline has a rank on host a and one on b."""


def lose_each_other(world, slot_of):
    """All ranks leave because they have lost a peer, from these slots of step 3."""
    for host in world.layout_hosts:
        world.places = {rank: Place(3, *at) for rank, at in slot_of.items()}
        ranks = world.told[host, world.generation(host)]["ranks"]
        world.report(host, parked=dict.fromkeys(ranks, "another rank has ended or cannot be reached"))
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
    assert world.told["a", 1]["drop"] == ([culprit["rank"]] if "rank" in culprit else [])


def test_ranks_that_cannot_be_told_apart_are_none_of_them_the_culprit():
    world = World()
    world.job_rows = ROWS
    world.train()
    fault = lose_each_other(world, {rank: (len(ROWS.row(rank)), False) for rank in range(4)})
    assert fault["culprit"] == {} and "lost each other" in fault["evidence"]
    assert world.told["a", 1]["drop"] == [], "everybody keeps the process"


def test_ranks_that_lost_those_of_a_host_that_falls_silent_wait_for_its_name():
    world = World(silence_s=5.0)
    world.train()
    world.pass_time(2.5, "a")
    world.report("a", parked={0: "lost", 1: "lost"})
    world.settle()
    assert not world.events("fault"), "b has not been heard of for a while"
    while not world.events("fault"):
        world.now += 0.1
        world.report("a", parked={0: "lost", 1: "lost"})
        world.job.tick(world.now)
    assert world.events("fault")[0]["kind"] == "host" and world.events("fault")[0]["culprit"] == {"host": "b"}


def test_without_in_process_restarts_every_process_ends():
    world = World(in_process=False)
    world.train()
    world.kill(3)
    world.settle()
    assert world.told["a", 1]["drop"] is None and not world.told["a", 1]["in_process"]


def test_the_most_telling_end_is_the_cause_whoever_is_heard_first():
    world = World()
    world.train()
    world.kill(0, FaultKind.lost_peer, 1)
    world.job.tick(world.now)
    assert not world.events("fault"), "a lost peer is a consequence: what is the cause may still come"
    world.kill(2)
    world.settle()
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
    world = World()
    world.train()
    world.kill(0, FaultKind.corruption, 1, ranks=ranks)
    world.settle()
    assert world.events("fault")[0]["culprit"] == culprit
    assert world.job.stage is Stage.stopping


def test_bad_input_ends_the_run_at_once():
    world = World()
    world.train()
    world.kill(1, FaultKind.input_error, 2)
    world.settle()
    assert world.job.code == 2 and world.events("end") and len(world.events("attempt")) == 1


@pytest.mark.parametrize("kind, most", [(FaultKind.signal, 3), (FaultKind.host_memory, 2), (FaultKind.bad_numbers, 1)])
def test_the_same_fault_at_the_same_step_ends_the_run(kind, most):
    world = World()
    world.train()
    for number in range(most):
        assert world.job.code is None, f"{number} of {most}"
        world.kill(1, kind, -9, step=7)
        world.settle()
        if world.job.stage is Stage.stopping:
            world.stop_all()
            for host in HOSTS:
                world.report(host)
    assert world.job.code == 1 and len(world.events("fault")) == most


def test_faults_at_other_steps_go_on_until_the_budget_is_used_up():
    world = World(max_restarts=4)
    world.train()
    for step in range(5):
        assert world.job.code is None
        world.kill(1, step=step)
        world.settle()
        if world.job.stage is Stage.stopping:
            world.stop_all()
            for host in HOSTS:
                world.report(host)
    assert world.job.code == 1 and "max_restarts=4" in world.events("end")[0]["reason"]


def test_restarts_without_a_good_step_between_wait_longer_each_time():
    world = World(backoff_s=10.0)
    world.train()
    waits = []
    for step in range(4):
        world.kill(1, step=step)
        world.settle()
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


def test_a_stopped_rank_is_a_fault_though_nobody_has_ended():
    world = World()
    world.train()
    for _ in range(30):
        world.now += 0.1
        world.report("a")
        world.report("b", state="T")
        world.job.tick(world.now)
        if world.job.stage is Stage.stopping:
            break
    (fault,) = world.events("fault")
    assert fault["kind"] == "stopped" and fault["culprit"] == {"rank": 2, "host": "b"}


def test_a_silent_host_is_a_fault_of_that_host():
    world = World(silence_s=5.0)
    world.train()
    world.pass_time(4.5, "a")
    assert not world.events("fault")
    world.pass_time(1.5, "a")
    assert world.events("fault")[0]["culprit"] == {"host": "b"} and world.events("fault")[0]["kind"] == "host"
    assert world.started[-1] == ("b", 2), "another agent is tried"


FOUR = {"a": 1, "b": 1, "c": 1, "d": 1}
SITES = (["a", "b"], ["c", "d"])


def restart_takes(world, seconds):
    """Come to a good step after so long."""
    world.job.launch(world.now)
    world.connect()
    world.now += seconds
    for host in world.layout_hosts:
        world.report(host)


def test_a_site_of_which_nobody_is_heard_may_be_silent_for_as_long_as_a_restart_takes():
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


@pytest.mark.parametrize(("restart_s", "patience_s"), [(1.0, 10.0), (14.0, 14.0), (300.0, 30.0)])
def test_a_silent_site_has_time_within_bounds(restart_s, patience_s):
    world = World(FOUR, sites=SITES, silence_s=5.0)
    restart_takes(world, restart_s)
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
        world.report(host, parked=dict.fromkeys(world.told[host, 1]["ranks"], "left"))
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
        world.report(host, parked=dict.fromkeys(world.told[host, 1]["ranks"], "left"))
    world.job.tick(world.now)
    assert world.job.stage is Stage.restarting
    for _ in range(20):
        world.now += 0.5
        world.job.tick(world.now)
    assert sum("waiting for hosts" in line for line in world.said) == 1, "it says so once"
    for host in ("c", "d"):
        world.report(host, codes=dict.fromkeys(world.told[host, world.generation(host)]["ranks"], -15))
    world.now += 2.0
    world.job.tick(world.now)
    assert world.job.attempt == 2


def test_hosts_of_a_site_are_not_heard_again_at_once():
    """After a cut each connection goes on when its own next packet is due."""
    world = World(FOUR, sites=SITES, silence_s=5.0)
    world.train()
    world.pass_time(7.0, "a", "b")
    world.pass_time(4.0, "a", "b", "c")
    assert not world.events("fault")
    world.pass_time(4.0, "a", "b", "c")
    assert world.events("fault")[0]["culprit"] == {"host": "d"}


def test_one_silent_host_of_a_site_is_no_matter_of_links():
    world = World(FOUR, sites=SITES, silence_s=5.0)
    world.train()
    world.pass_time(6.0, "a", "b", "d")
    (fault,) = world.events("fault")
    assert fault["culprit"] == {"host": "c"} and not world.events("alert")


def test_a_driver_that_was_stopped_itself_blames_nobody_for_the_silence():
    world = World(silence_s=5.0)
    world.train()
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
    assert world.told["a", 1]["ranks"] == [0, 1] and world.told["a", 1]["run"]
    assert world.away_asked[-1] == {"b"}
    before, waits = len(world.started), [limit_s, 2 * limit_s][: 2 if 3 * limit_s < PROBE_S else 1]
    for tried, wait in enumerate(waits):
        since = world.now
        while len(world.started) - before == tried:
            world.pass_time(0.5, "a")
            assert world.now - since <= wait + HOSTS_S + 1.0, "it is tried again"
        assert world.now - since >= wait - HOSTS_S - 1.0, "ever less often: an agent has its time to start"
    assert {host for host, _ in world.started[before:]} == {"b"}
    world.connect("b")
    world.pass_time(3.0, "a")
    assert [event["host"] for event in world.events("readmit")] == ["b"]


def test_an_agent_that_has_ended_is_noticed_at_once_and_started_again():
    world = World()
    world.train()
    world.job.on_lost("b", 1)
    world.job.tick(world.now)
    assert not world.events("fault"), "a connection may come back"
    world.job.on_exit("b", 1)
    world.now += LOOK_S
    world.job.tick(world.now)
    assert world.events("fault")[0]["kind"] == "agent" and world.started[-1] == ("b", 2)
    world.report("a", codes={0: -15, 1: -15})
    world.connect("b")
    world.report("b", attempt=0)
    world.job.tick(world.now)
    assert world.job.attempt == 2 and world.told["b", 2]["run"]


def test_an_agent_of_an_earlier_generation_is_ended():
    world = World()
    world.train()
    world.job.on_exit("b", 1)
    world.job.on_lost("b", 1)
    world.job.tick(world.now)
    world.job.on_connected("b", 1, world.now)
    assert world.told["b", 1] == {"end": True, "replaced": True}
    heard = world.job.fleet.hosts["b"].heard
    world.now += 1
    world.job.on_report("b", 1, {}, world.now)
    assert world.job.fleet.hosts["b"].heard == heard
    world.job.on_connected("stranger", 5, world.now)
    assert world.told["stranger", 5] == {"end": True, "replaced": True}


def test_a_driver_that_is_started_again_goes_on_where_the_journal_ends():
    world = World()
    world.train()
    again = World(past=world.journal)
    again.job.attach(again.now)
    assert again.job.attempt == 1 and not again.started
    again.connect()
    assert again.told["a", 1]["run"] and again.told["a", 1]["attempt"] == 1
    again.report("a", step=5)
    again.report("b", step=5)
    assert again.job.stage is Stage.running and len(again.events("good_step")) == 1
    again.kill(2)
    again.settle()
    assert again.events("fault")
    again.stop_all()
    assert again.job.attempt == 2


def test_a_driver_that_is_started_again_counts_what_was_before():
    world = World()
    world.train()
    for _ in range(2):
        world.kill(1, step=7)
        world.settle()
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
    world = World()
    world.train()
    again = World(past=world.journal, silence_s=5.0)
    again.job.attach(again.now)
    again.connect("a")
    again.pass_time(4.0, "a")
    assert not again.events("fault")
    again.pass_time(CONNECT_S, "a")
    assert again.events("fault")[0]["culprit"] == {"host": "b"}


def test_a_new_launch_begins_anew_with_numbers_that_nobody_had():
    world = World()
    world.train()
    world.job.end(130, "stopped")
    again = World(past=world.journal)
    again.job.launch(again.now)
    assert again.job.attempt == 2 and again.events("attempt")[-1]["reason"] == "start"
    assert again.started == [("a", 2), ("b", 2)]


def test_messages_of_another_form_are_refused():
    world = World()
    world.train()
    for message in ({}, {"report": {}, "ends": {}, "attempt": 1}, {"report": None, "ends": None, "attempt": None}):
        with pytest.raises(ValueError, match="not of this form"):
            world.job.on_report("a", 1, message, world.now)
    assert world.job.stage is Stage.running


def test_a_host_that_is_evicted_goes_with_the_next_attempt_and_comes_back_when_it_is_readmitted():
    world = World()
    world.train()
    world.on_deny_list = {"b": "by hand"}
    world.pass_time(3.0, "a", "b")
    assert [event["host"] for event in world.events("evict")] == ["b"] and world.job.attempt == 1
    world.kill(1)
    world.settle()
    world.stop_all()
    assert world.told["a", 1]["run"] and not world.told["b", 1]["run"]
    assert world.events("attempt")[-1]["reason"] == "shrink"
    world.report("a")
    world.on_deny_list = {}
    world.checkpoint = "step-00000004"
    world.pass_time(5.0, "a")
    assert [event["host"] for event in world.events("readmit")] == ["b"]
    assert world.job.attempt == 2, "steps since the last checkpoint would be lost"
    world.checkpoint = "step-00000008"
    world.pass_time(3.0, "a")
    assert not world.told["a", 1]["run"]
    world.report("a", codes={0: -15, 1: -15})
    world.job.tick(world.now)
    assert world.told["b", 1]["run"] and world.events("attempt")[-1]["reason"] == "grow"
    assert len(world.events("fault")) == 1


def test_a_run_grows_once_a_memory_checkpoint_has_become_whole():
    world = World()
    world.train()
    world.on_deny_list = {"b": "by hand"}
    world.pass_time(3.0, "a", "b")
    world.kill(1)
    world.settle()
    world.stop_all()
    world.report("a", kept=4)
    world.on_deny_list = {}
    world.job.tick(world.now + 5.0)
    assert world.told["a", 1]["run"], "steps since that one would be lost"
    world.report("a", kept=9)
    world.job.tick(world.now + 10.0)
    assert not world.told["a", 1]["run"]


def test_without_hosts_the_run_waits():
    world = World(hosts={"a": 2})
    world.train()
    world.on_deny_list = {"a": "by hand"}
    world.kill(1)
    world.settle()
    world.stop_all()
    assert world.job.stage is Stage.restarting and any("waiting for hosts" in line for line in world.said)
    world.on_deny_list = {}
    world.now += CONNECT_S
    world.job.tick(world.now)
    assert world.job.attempt == 2


def fail_twice(world):
    """Two faults of the same host."""
    world.train()
    for step in (3, 4):
        world.kill(3, step=step)
        world.settle()
        world.stop_all(doctor=False)
        if step == 3:
            for host in HOSTS:
                world.report(host)


def test_a_host_that_keeps_on_failing_is_examined_and_goes_on_if_it_is_well():
    world = World()
    fail_twice(world)
    assert world.job.stage is Stage.examining
    assert world.told["b", 1]["examine"] and not world.told["b", 1]["run"] and not world.told["a", 1]["examine"]
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
    assert world.job.attempt == 3 and not world.told["b", 1]["run"] and world.told["a", 1]["run"]


def test_an_examination_that_does_not_end_is_one_that_failed():
    world = World()
    fail_twice(world)
    world.now += 2 * DOCTOR_S
    world.report("a", codes={0: -15, 1: -15})
    world.job.tick(world.now)
    assert list(world.on_deny_list) == ["b"] and world.job.attempt == 3


def test_the_only_host_is_not_examined():
    world = World(hosts={"a": 2})
    world.train()
    for step in (3, 4, 5):
        world.kill(1, step=step)
        world.settle()
        world.stop_all()
        world.report("a")
    assert world.job.attempt == 4


def test_a_run_begins_without_hosts_that_are_denied():
    world = World()
    world.on_deny_list = {"b": "by hand"}
    world.job.launch(world.now)
    assert world.started == [("a", 1)] and world.away_asked == [{"b"}]
    assert world.events("evict")[0]["host"] == "b"
