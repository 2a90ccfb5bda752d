"""The driver's decisions: what each host's agent should do, from what agents say, what the journal says, and a clock.

No I/O, so that tests play agents and clock. What is decided goes out through `Effects`; what must outlive the driver
goes into the journal first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol

from weft.conf.schema import CommConfig, SuperviseConfig
from weft.engine.supervision.deadlines import Deadlines
from weft.engine.supervision.faults import POLICIES, FaultKind, RankEnd, Response, cause
from weft.engine.supervision.progress import first_good_step, has_plan, step_under_way
from weft.engine.supervision.report import HostReport
from weft.engine.supervision.watch import Verdict, Watch
from weft.pipeline.culprit import JobRows

SETTLE_S = 0.3
"""Seconds between the first bad end of a rank and the judgement, in which a more telling one may be heard of."""
CONNECT_S = 30.0
"""Seconds that a host has to start an agent, and the agent to reach the driver."""
MOST_BACKOFF_S = 600.0
SAME_FAULT = 3
"""Times that the same fault at the same step may come before the run ends."""


class Stage(Enum):
    """Where a job is in an attempt's life."""

    starting = "starting"
    running = "running"
    stopping = "stopping"
    restarting = "restarting"
    ended = "ended"


@dataclass(frozen=True)
class Layout:
    """Which host has which ranks in an attempt.

    Attributes:
        slots: ranks by host, in the order of their numbers.
        master: address and port at which the ranks meet.
        arguments: of each rank.
    """

    slots: Mapping[str, int]
    master: tuple[str, int]
    arguments: tuple[str, ...]

    def ranks(self) -> dict[str, list[int]]:
        """Global ranks by host."""
        ends = accumulate(self.slots.values())
        pairs = zip(self.slots.items(), ends, strict=True)
        return {host: list(range(end - count, end)) for (host, count), end in pairs}


class Effects(Protocol):
    """What a job does to the world."""

    def start_agent(self, host: str, generation: int) -> None:
        """Start an agent on a host."""

    def tell(self, host: str, generation: int, message: Mapping[str, Any]) -> None:
        """Send a message to an agent, now or when it connects."""

    def record(self, event: str, **fields: Any) -> None:
        """Write into the journal."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def rows(self) -> JobRows | None:
        """What the ranks execute, by the plan that they have left; None if it cannot be read."""


@dataclass
class Host:
    """What the driver knows of a host.

    Attributes:
        generation: of its newest agent.
        connected: whether that agent has a connection.
        exited: whether its process is known to have ended.
        heard: when it was last heard of.
        since: when the agent was started.
        attempt: whose ranks it has; None before it has said so.
        codes: of these ranks, None of those that run.
    """

    generation: int = 0
    connected: bool = False
    exited: bool = False
    heard: float = 0.0
    since: float = 0.0
    attempt: int | None = None
    codes: dict[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """What ended an attempt."""

    kind: str
    culprit: Mapping[str, Any]
    evidence: str
    step: int | None
    seconds: float
    most: int = SAME_FAULT
    final: bool = False


class Job:
    """One run, from its start to its end, over as many attempts as it takes.

    Attributes:
        code: exit code of the run, once it has ended.
    """

    def __init__(
        self,
        *,
        settings: SuperviseConfig,
        layouts: Callable[[int, Collection[str], Mapping[str, int] | None], Layout],
        effects: Effects,
        target: str,
        link_deadline_s: float = CommConfig.deadline_s,
        past: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Nothing happens before `begin`.

        Args:
            layouts: from the attempt's number, the hosts that are away and the ranks by host of the attempt before.
            target: ``module:function`` that a rank runs.
            link_deadline_s: seconds that a transfer between sites may stand still.
            past: the journal so far.
        """
        self._settings, self._layouts, self._effects, self._target = settings, layouts, effects, target
        self._link_deadline_s = link_deadline_s
        self._deadlines = Deadlines(least_s=settings.least_deadline_s, setup_s=settings.setup_deadline_s)
        self.stage = Stage.starting
        self.attempt = 0
        self.code: int | None = None
        self.hosts: dict[str, Host] = {}
        self._layout: Layout | None = None
        self._away: set[str] = set()
        self._ends: dict[int, RankEnd] = {}
        self._ends_since = 0.0
        self._moved = 0.0
        self._restarts = 0
        self._fruitless = 0
        self._seen: list[tuple[str, str, int | None]] = []
        self._resume_at = 0.0
        self._watch = self._new_watch(0.0)
        self._replay(past)

    def _replay(self, past: Sequence[Mapping[str, Any]]) -> None:
        for event in past:
            match event["event"]:
                case "launch":
                    self._restarts = self._fruitless = 0
                    self._seen.clear()
                    self._away.clear()
                    self.stage = Stage.starting
                    self._layout = None
                    for host in self.hosts.values():
                        host.exited = True
                case "attempt":
                    self.attempt = event["attempt"]
                    self.stage = Stage.starting
                    self._layout = Layout(event["slots"], tuple(event["master"]), tuple(event["arguments"]))
                    self._restarts += event["reason"] != "start"
                case "agent":
                    self.hosts[event["host"]] = Host(generation=event["generation"])
                case "fault":
                    self._note_fault(event["kind"], event["culprit"], event.get("step"))
                    self.stage = Stage.stopping
                case "good_step":
                    self._fruitless = 0
                    self.stage = Stage.running
                case "evict":
                    self._away.add(event["host"])
                case "readmit":
                    self._away.discard(event["host"])
                case "end":
                    self.stage = Stage.ended

    def _new_watch(self, now: float) -> Watch:
        self._has_rows = False
        return Watch(
            attempt=self.attempt,
            num_ranks=self._num_ranks,
            deadlines=self._deadlines,
            heartbeat_s=self._settings.heartbeat_s,
            link_deadline_s=self._link_deadline_s,
            now=now,
        )

    @property
    def _num_ranks(self) -> int:
        return 0 if self._layout is None else sum(self._layout.slots.values())

    # Beginning

    def launch(self, now: float) -> None:
        """Begin a run."""
        self._effects.record("launch")
        self._replay([{"event": "launch"}])
        self._begin_attempt("start", now)

    def attach(self, now: float) -> None:
        """Go on with a run whose driver has ended: its agents report within the time that hosts may be silent."""
        assert self._layout is not None
        self._watch = self._new_watch(now)
        for host in self.hosts.values():
            host.heard = host.since = now
        self._moved = now
        if self.stage is Stage.starting:
            self._start_missing_agents(now)

    def _begin_attempt(self, reason: str, now: float) -> None:
        before = None if self._layout is None else self._layout.slots
        try:
            layout = self._layouts(self.attempt + 1, self._away, before)
        except ValueError as error:
            if reason == "start":
                raise
            self._effects.say(f"waiting for hosts: {str(error).splitlines()[0]}")
            self._resume_at = now + CONNECT_S
            self.stage = Stage.restarting
            return
        self._layout = layout
        self.attempt += 1
        self._restarts += reason != "start"
        self._effects.record(
            "attempt",
            attempt=self.attempt,
            reason=reason,
            ranks={str(rank): host for host, ranks in layout.ranks().items() for rank in ranks},
            slots=dict(layout.slots),
            master=list(layout.master),
            arguments=list(layout.arguments),
        )
        self.stage = Stage.starting
        self._ends.clear()
        self._moved = now
        self._watch = self._new_watch(now)
        self._start_missing_agents(now)
        self._assign_all()

    def _start_missing_agents(self, now: float) -> None:
        assert self._layout is not None
        for name in self._layout.slots:
            host = self.hosts.setdefault(name, Host())
            if not host.generation or host.exited:
                self._start_agent(name, now)

    def _start_agent(self, name: str, now: float) -> None:
        generation = self.hosts[name].generation + 1
        self.hosts[name] = Host(generation=generation, since=now, heard=now)
        self._effects.record("agent", host=name, generation=generation)
        self._effects.start_agent(name, generation)

    def _assign_all(self) -> None:
        for name in self.hosts:
            self._assign(name)

    def _assign(self, name: str) -> None:
        """Tell a host what is wanted of it now."""
        assert self._layout is not None
        ranks = self._layout.ranks().get(name, [])
        address, port = self._layout.master
        message = {
            "attempt": self.attempt,
            "run": bool(ranks) and self.stage in (Stage.starting, Stage.running),
            "ranks": ranks,
            "target": self._target,
            "arguments": list(self._layout.arguments),
            "environment": {
                "WORLD_SIZE": str(sum(self._layout.slots.values())),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            },
        }
        self._effects.tell(name, self.hosts[name].generation, message)

    # What agents say

    def on_connected(self, name: str, generation: int, now: float) -> None:
        """An agent has a connection, for the first time or again."""
        host = self.hosts.get(name)
        if host is None or generation != host.generation or self.stage is Stage.ended:
            self._effects.tell(name, generation, {"end": True})  # what is left of a host that was given up
            return
        host.connected, host.heard = True, now
        self._assign(name)

    def on_lost(self, name: str, generation: int) -> None:
        """Its connection has ended; it may come back."""
        host = self.hosts.get(name)
        if host is not None and generation == host.generation:
            host.connected = False

    def on_exit(self, name: str, generation: int) -> None:
        """The process by which this driver started an agent has ended."""
        host = self.hosts.get(name)
        if host is not None and generation == host.generation:
            host.exited = True

    def on_report(self, name: str, generation: int, message: Mapping[str, Any], now: float) -> None:
        """An agent's regular message, or its first after a change.

        Raises:
            ValueError: it has another form.
        """
        host = self.hosts.get(name)
        if host is None or generation != host.generation or self.stage is Stage.ended:
            return
        report, ends = HostReport.from_wire(message["report"]), _ends(message["ends"])
        host.heard, host.attempt = now, int(message["attempt"])
        host.codes = {rank.rank: rank.exit_code for rank in report.ranks}
        if host.attempt == self.attempt and self.stage in (Stage.starting, Stage.running):
            self._watch.observe(report, now)
            self._take_ends(ends, now)
            self._note_progress()

    def _take_ends(self, ends: Mapping[int, RankEnd], now: float) -> None:
        if ends and not self._ends:
            self._ends_since = now
        self._ends |= ends
        if all(code == 0 for code in self._codes()):
            self.end(0, "every rank has finished")

    def _codes(self) -> list[int | None]:
        """Exit codes of all ranks of the attempt; None of one that runs, or that nothing is known of."""
        assert self._layout is not None
        hosts = [self.hosts[name] for name in self._layout.slots]
        said = {rank: code for host in hosts if host.attempt == self.attempt for rank, code in host.codes.items()}
        return [said.get(rank) for rank in range(self._num_ranks)]

    def _note_progress(self) -> None:
        if not self._has_rows and has_plan(self._watch):
            self._has_rows = True
            self._watch.rows = self._effects.rows()
        step = first_good_step(self._watch, self._num_ranks)
        if self.stage is Stage.starting and step is not None:
            self.stage = Stage.running
            self._fruitless = 0
            self._effects.record("good_step", attempt=self.attempt, step=step)

    # Time

    def tick(self, now: float) -> None:
        """Look for what has not happened in time; about ten times a second."""
        if self.stage in (Stage.starting, Stage.running):
            fault = self._fault(now)
            if fault is not None:
                self._take_fault(fault, now)
        if self.stage is Stage.stopping and self._all_stopped(now):
            self._schedule_restart(now)
        if self.stage is Stage.restarting and now >= self._resume_at:
            self._begin_attempt("restart", now)

    def _fault(self, now: float) -> Fault | None:
        if self._ends:
            settled = now >= self._ends_since + SETTLE_S
            return self._fault_of_ends(now) if settled else None
        assert self._layout is not None
        for name in self._layout.slots:
            host = self.hosts[name]
            silent = now - host.heard
            if not host.connected and host.exited:
                return self._fault_of("agent", {"host": name}, "its agent has ended", now)
            patience = CONNECT_S if host.attempt is None else self._settings.silence_s
            if silent > patience:
                return self._fault_of("host", {"host": name}, f"no sign of its agent for {silent:.1f} s", now)
        verdict = self._watch.verdict(now)
        return None if verdict is None else self._fault_of_verdict(verdict)

    def _fault_of_verdict(self, verdict: Verdict) -> Fault:
        return Fault(verdict.kind, verdict.culprit, verdict.evidence, verdict.step, verdict.seconds)

    def _fault_of(self, kind: str, culprit: Mapping[str, Any], evidence: str, now: float) -> Fault:
        return Fault(kind, culprit, evidence, step_under_way(self._watch), now - self._watch.still_since)

    def _fault_of_ends(self, now: float) -> Fault:
        rank = cause(self._ends)
        end = self._ends[rank]
        policy = POLICIES[end.kind]
        step = step_under_way(self._watch) if end.step is None else end.step
        return Fault(
            end.kind.value,
            {"rank": rank, "host": self._host_of(rank)},
            end.message.splitlines()[0] if end.message else "",
            step,
            now - self._watch.still_since,
            policy.most,
            policy.response is Response.stop,
        )

    def _host_of(self, rank: int) -> str:
        assert self._layout is not None
        return next(host for host, ranks in self._layout.ranks().items() if rank in ranks)

    # Faults

    def _take_fault(self, fault: Fault, now: float) -> None:
        self._effects.record(
            "fault",
            attempt=self.attempt,
            kind=fault.kind,
            culprit=dict(fault.culprit),
            seconds=round(fault.seconds, 3),
            evidence=fault.evidence,
            step=fault.step,
        )
        same = self._note_fault(fault.kind, fault.culprit, fault.step)
        where = ", ".join(f"{name} {value}" for name, value in fault.culprit.items())
        self._effects.say(f"attempt {self.attempt}: {fault.kind}: {where}: {fault.evidence}")
        if fault.final:
            code = 2 if fault.kind == FaultKind.input_error.value else 1
            self.end(code, f"{fault.kind}: {where}: {fault.evidence}")
        elif same >= fault.most:
            self.end(1, f"the same fault at the same step {same} times: {fault.kind}: {where}: {fault.evidence}")
        elif self._restarts >= self._settings.max_restarts:
            self.end(1, f"supervise.max_restarts={self._settings.max_restarts} reached; {fault.kind}: {where}")
        else:
            self.stage = Stage.stopping
            self._moved = now
            for name, host in self.hosts.items():
                if name in fault.culprit.values() and fault.kind in ("agent", "host"):
                    host.exited = True
            self._start_missing_agents(now)
            self._assign_all()

    def _note_fault(self, kind: str, culprit: Mapping[str, Any], step: int | None) -> int:
        """Times in which this fault has come at this step."""
        key = (kind, repr(sorted(culprit.items())), step)
        self._seen.append(key)
        self._fruitless += 1
        return self._seen.count(key)

    def _all_stopped(self, now: float) -> bool:
        """Whether no rank of the attempt is left, as far as can be known; hosts without an agent are given up."""
        assert self._layout is not None
        done = True
        for name in self._layout.slots:
            host = self.hosts[name]
            if host.connected:
                codes = host.codes.values() if host.attempt == self.attempt else ()
                done &= host.attempt is not None and None not in codes
            elif now - max(host.since, self._moved) > CONNECT_S or (host.exited and now - host.since > CONNECT_S):
                self._evict(name, "no agent could be started or reached")
            else:
                done = False
            if host.connected and now - host.heard > self._settings.silence_s:
                host.connected, host.exited = False, True
                self._start_missing_agents(now)
        return done

    def _evict(self, name: str, reason: str) -> None:
        if name not in self._away:
            self._away.add(name)
            self._effects.record("evict", host=name, reason=reason)
            self._effects.say(f"host {name} is left out: {reason}")

    def _schedule_restart(self, now: float) -> None:
        backoff = self._settings.backoff_s * 2 ** max(0, self._fruitless - 2) if self._fruitless > 1 else 0.0
        self._resume_at = now + min(backoff, MOST_BACKOFF_S)
        self.stage = Stage.restarting

    def end(self, code: int, reason: str) -> None:
        """End the run: every agent ends its ranks and itself."""
        if self.stage is Stage.ended:
            return
        self.stage = Stage.ended
        self.code = code
        self._effects.record("end", code=code, reason=reason)
        if code:
            self._effects.say(reason)
        for name, host in self.hosts.items():
            self._effects.tell(name, host.generation, {"end": True})


def _ends(said: Mapping[str, Mapping[str, Any]]) -> dict[int, RankEnd]:
    """Bad ends of ranks as an agent tells them.

    Raises:
        ValueError: of another form.
    """
    try:
        return {
            int(rank): RankEnd(
                kind=FaultKind(end["kind"]), message=end["message"], step=end["step"], status=end["status"]
            )
            for rank, end in said.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"ends of ranks: not of this form ({error!r}); use one Weft on all hosts") from error
