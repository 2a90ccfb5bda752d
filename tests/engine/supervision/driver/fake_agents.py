"""A job whose agents are played, with a journal and a clock that is set."""

from weft.conf.schema.supervision import SuperviseConfig
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.detector import SETTLE_S
from weft.engine.supervision.driver.hosts import Layout
from weft.engine.supervision.driver.job import Job
from weft.engine.supervision.driver.state import Stage
from weft.engine.supervision.messages import (
    AgentMessage,
    FaultKind,
    HostReport,
    RankEnd,
    RankReport,
    RowProgress,
    to_fields,
)

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
        self.calls, self.written, self.following = "", 0, None
        self.progress = {}
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

    def send_state(self, host, generation, message):
        self.told[host, generation] = message

    def record(self, event, **fields):
        self.journal.append({"at": 0.0, "event": event, **fields})

    def say(self, text):
        self.said.append(text)

    def rows(self):
        return self.job_rows

    def plan_time(self):
        return self.written

    def next_attempt(self):
        return self.following

    def differing_calls(self, stalled_s):
        return self.calls

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
        standby=None,
        examined=0,
        failed=(),
        kept=0,
        ready=True,
        leaving=False,
        lines=None,
    ):
        """The host says that its ranks are there, or have ended."""
        attempt = self.job.attempt if attempt is None else attempt
        ranks = self.told[host, self.generation(host)].ranks
        reports = tuple(
            RankReport(
                rank,
                attempt,
                phase,
                self.progress.get(rank, RowProgress(step)),
                num_microbatches=4,
                state=state,
                exit_code=(codes or {}).get(rank),
                kept_step=kept,
            )
            for rank in ranks
        )
        message = AgentMessage(
            attempt, ready, HostReport(host, reports), ends or {}, standby or {}, lines or {}, examined, failed, leaving
        )
        self.job.on_report(host, self.generation(host), to_fields(message), self.now)

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
        return self

    def lose(self, *args, **named):
        """A rank ends badly as in `kill`, and no more telling end comes."""
        self.kill(*args, **named)
        self.settle()

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
            ranks = self.told[host, self.generation(host)].ranks
            self.report(host, codes=dict.fromkeys(ranks, -15))
        self.job.tick(self.now)
        if doctor and self.job.stage is Stage.examining:
            for host in self.layout_hosts:
                ranks = self.told[host, self.generation(host)].ranks
                self.report(host, codes=dict.fromkeys(ranks, -15), examined=self.job.attempt)
            self.job.tick(self.now)
