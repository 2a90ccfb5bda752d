"""A run on a clock of its own: ranks move through their rows, and hosts report on them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.engine.supervision.driver.stalling_job import StallingJob
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.alerts import Alerts
from weft.engine.supervision.driver.culprit import JobRows, Replica
from weft.engine.supervision.driver.limits import Deadlines
from weft.engine.supervision.driver.watch import Watch
from weft.engine.supervision.messages import HostReport, LinkReading, RankReport, RowProgress
from weft.pipeline.generators import generate
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement

LOOK_S = 0.1
HOSTS = 2


def rows_of(sites=(2,), replicas=2, kind="1f1b", microbatches=4, cells=(), busy_s=()):
    schedule = lower(generate(kind, Placement.straight(sum(sites), sites), microbatches), zero_stage=1)
    stages = range(sum(sites))
    ranks = [tuple(stage * replicas + n for stage in stages) for n in range(replicas)]
    return JobRows(tuple(Replica(schedule, row, busy_s) for row in ranks), cells)


@dataclass
class FakeRun:
    """A job of ranks, half of them on host h0 and half on h1, and a watch over it.

    Attributes:
        moves_per_s: moves of ranks in a second, over all of them.
        stopped: ranks that a signal has stopped.
        locked: ranks one of whose threads has the interpreter's lock; ``computing`` tells whether it computes.
        away: hosts that do not report.
        idle: no rank moves, and the watch must not report it.
        slowed: how much longer computations of a rank take than others'.
        found: diagnoses, with when they were given.
        raised: alerts.
    """

    rows: JobRows = field(default_factory=rows_of)
    deadlines: Deadlines | None = None
    moves_per_s: float = 400.0
    heartbeat_s: float = 1.0
    link_deadline_s: float = 30.0
    knows_rows: bool = True
    attempt: int = 1

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.job = StallingJob(self.rows, random.Random(0))
        self.ranks = sorted(self.rows.seats)
        self.deadlines = self.deadlines or Deadlines(least_s=4.0, setup_s=600.0)
        self.watch = Watch(
            attempt=self.attempt,
            num_ranks=len(self.ranks),
            deadlines=self.deadlines,
            heartbeat_s=self.heartbeat_s,
            link_deadline_s=self.link_deadline_s,
            now=self.now,
        )
        self.alerts = Alerts(self.watch)
        self.raised: list = []
        self.phases = dict.fromkeys(self.ranks, Phase.imports)
        self.stopped: set[int] = set()
        self.locked: set[int] = set()
        self.computing = True
        self.away: set[str] = set()
        self.idle = True
        self.links: dict[int, tuple[LinkReading, ...]] = {}
        self.slowed: dict[int, float] = {}
        self.found: list = []
        self.uneven = 0.05
        self.vitals: dict[str, dict] = {}
        self._ticks = dict.fromkeys(self.ranks, 0)
        self._cpu_s = dict.fromkeys(self.ranks, 0.0)
        self._busy_s = dict.fromkeys(self.ranks, 0.0)
        self._moved_at = dict.fromkeys(self.ranks, self.now)
        self._told: dict[int, tuple] = {}
        self._report_at = self.now
        self._owed = 0.0

    def host(self, rank: int) -> str:
        return f"h{rank * HOSTS // len(self.ranks)}"

    def enter(self, phase: Phase, *ranks: int) -> None:
        """Ranks, or all of them, begin a phase."""
        for rank in ranks or self.ranks:
            self.phases[rank] = phase
            place = self.job.progress[rank]
            if place.step:
                self.job.progress[rank] = place._replace(waits=place.waits + 2)
            self._moved_at[rank] = self.now

    def begin(self, seconds: float = 30.0) -> None:
        """The run starts and trains for a while."""
        for phase in (Phase.imports, Phase.setup, Phase.first_step):
            self.enter(phase)
            self.advance(3.0)
        if self.knows_rows:
            self.watch.rows = self.rows
        self.idle = False
        self.advance(1.0)
        self.enter(Phase.steady)
        self.advance(seconds)
        assert not self.found and self.job.progress[0].step > 3

    def advance(self, seconds: float, *, stop: bool = True) -> None:
        """Let time go on; ends early with a first diagnosis."""
        end = self.now + seconds
        while self.now < end - 1e-9 and not (self.found and stop):
            self.now += LOOK_S
            self._live()
            if self.now >= self._report_at - 1e-9:
                self._report_at = self.now + self.heartbeat_s
                self._report()
                self.raised += self.alerts.look(self.now)
            diagnosis = self.watch.diagnosis(self.now)
            if diagnosis is not None:
                self.found.append((self.now, diagnosis))

    def _live(self) -> None:
        for rank in self.ranks:
            if rank in self.stopped:
                continue
            if rank not in self.locked:
                self._ticks[rank] += 1
            self._cpu_s[rank] += LOOK_S * (self.computing if rank in self.locked else 0.3)
        if self.idle:
            return
        before = dict(self.job.progress)
        self._owed += self.moves_per_s * LOOK_S
        moves, self._owed = int(self._owed), self._owed % 1.0
        self.job.stopped = next(iter(self.stopped), None)
        self.job.hung = next(iter(self.locked), self.job.hung)
        self.job.move(moves)
        for rank in self.ranks:
            if self.job.progress[rank] != before[rank]:
                self._moved_at[rank] = self.now
            if self.job.progress[rank].step > before[rank].step > 0:
                self._busy_s[rank] += self.slowed.get(rank, 1.0) * (1 + self.uneven * self.job.rng.random())

    def _report(self) -> None:
        for host in sorted({self.host(rank) for rank in self.ranks} - self.away):
            mine = [rank for rank in self.ranks if self.host(rank) == host]
            self.watch.observe(HostReport(host, tuple(map(self.report_of, mine)), self.vitals.pop(host, {})), self.now)

    def report_of(self, rank: int) -> RankReport:
        phase = self.phases[rank]
        if phase is Phase.imports:
            return RankReport(rank, self.attempt, state=self._state(rank), cpu_s=self._cpu_s[rank])
        place = self.job.progress[rank]
        return RankReport(
            rank,
            self.attempt,
            phase,
            place if place.step else RowProgress(0),
            self.rows.replicas[0].schedule.num_microbatches if place.step else 0,
            still_s=round(self.now - self._moved_at[rank], 3),
            tick=self._ticks[rank],
            busy_s=self._busy_s[rank],
            measured_steps=max(0, place.step - 1),
            state=self._state(rank),
            cpu_s=round(self._cpu_s[rank], 2),
            links=self.links.get(rank, ()),
        )

    def _state(self, rank: int) -> str:
        return "T" if rank in self.stopped else "S"
