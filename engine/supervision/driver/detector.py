"""Failure detection: derives the fault that ends an attempt from the reports of the attempt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from weft.conf.schema import SuperviseConfig
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.alerts import Alerts
from weft.engine.supervision.driver.fleet import Fleet
from weft.engine.supervision.driver.hosts import Layout
from weft.engine.supervision.driver.limits import Deadlines, Fault, SiteTimeout
from weft.engine.supervision.driver.state import Effects
from weft.engine.supervision.driver.watch import Watch
from weft.engine.supervision.faults import POLICIES, cause
from weft.engine.supervision.messages import AgentMessage, FaultKind, HostReport, RankEnd

_BEFORE_TRAINING = (Phase.imports, Phase.setup, Phase.standby)
_BEFORE_A_STEP = (*_BEFORE_TRAINING, Phase.first_step)


class AttemptProgress:
    """The hosts that have not yet finished their imports, their first step, or all of their work.

    Attributes:
        has_plan: whether a rank has begun to train. Ranks write their plan into the run's folder before that.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._importing, self._without_step, self._unfinished = (set(layout.slots) for _ in range(3))
        self.has_plan = False

    def observe(self, report: HostReport) -> None:
        """Process a host's report of this attempt."""
        host = report.host
        complete = len(report.ranks) == self._layout.slots.get(host)
        if host in self._without_step:
            phases = [rank.phase for rank in report.ranks]
            if complete and Phase.imports not in phases:
                self._importing.discard(host)
            self.has_plan = self.has_plan or any(phase not in _BEFORE_TRAINING for phase in phases)
            if complete and not any(phase in _BEFORE_A_STEP for phase in phases):
                self._without_step.discard(host)
        if complete and all(rank.exit_code == 0 for rank in report.ranks):
            self._unfinished.discard(host)

    @property
    def has_imported(self) -> bool:
        """True if every rank has finished its imports."""
        return not self._importing

    @property
    def has_stepped(self) -> bool:
        """True if every rank has finished the first step of the attempt."""
        return not self._without_step

    @property
    def has_finished(self) -> bool:
        """True if every rank has succeeded."""
        return not self._unfinished


def all_lost(ends: Mapping[int, RankEnd]) -> bool:
    """True if every end is a consequence of another rank's end, so that none shows the cause."""
    return all(end.kind is FaultKind.lost_peer for end in ends.values())


def fault_of_ends(ends: Mapping[int, RankEnd], layout: Layout, watch: Watch, now: float) -> Fault:
    """Return the fault that ends an attempt, from the ends of its ranks.

    Args:
        ends: for at least one rank, its failure or the reason for its standby.
    """
    rank = cause(ends)
    end = ends[rank]
    culprit = _named(end.ranks or (rank,), layout)
    evidence = end.message.splitlines()[0] if end.message else ""
    if end.kind is FaultKind.bad_numbers:
        if end.ranks:
            evidence += f" (weft evict {' '.join(_hosts(culprit))})"
        else:  # all ranks end alike, so no single rank is to blame
            culprit = {}
    if all_lost(ends):
        culprit, waited = _awaited(ends, layout, watch, now)
        evidence = f"{waited}; rank {rank} reports: {evidence}"
    policy = POLICIES[end.kind]
    return Fault(
        end.kind.value,
        culprit,
        evidence,
        watch.step if end.step is None else end.step,
        now - watch.still_since,
        policy.most,
        policy.is_final,
    )


def _named(ranks: Sequence[int], layout: Layout) -> Mapping[str, Any]:
    """Return ``ranks`` with their hosts as a culprit. Ranks that are not in the attempt are omitted."""
    known = [rank for rank in ranks if 0 <= rank < layout.num_ranks]
    if len(known) == 1:
        return {"rank": known[0], "host": layout.host_of(known[0])}
    return {"ranks": known, "hosts": sorted({layout.host_of(rank) for rank in known})}


def _hosts(culprit: Mapping[str, Any]) -> Sequence[str]:
    return culprit["hosts"] if "hosts" in culprit else [culprit["host"]]


def _awaited(ends: Mapping[int, RankEnd], layout: Layout, watch: Watch, now: float) -> tuple[Mapping[str, Any], str]:
    """Return the culprit that all ranks with a lost peer waited for (empty if unknown), and a description."""
    suspects = watch.awaited(ends, now)
    ranks = [suspect.rank for suspect in suspects if suspect.rank is not None]
    hosts = sorted({layout.host_of(rank) for rank in ranks})
    if len(ranks) == 1:
        text = f"the others waited for rank {ranks[0]}, {suspects[0].doing}"
        return {"rank": ranks[0], "host": hosts[0]}, text
    if len(hosts) == 1:
        return {"host": hosts[0]}, f"the others waited for ranks of {hosts[0]}"
    if not ranks and suspects:
        return {"link": list(suspects[0].links[0])}, f"what was sent did not arrive: {suspects[0].doing}"
    return {}, "ranks have lost each other"


SETTLE_S = 0.3
"""Seconds between a rank's first failure and the diagnosis, in which a report of the actual cause may arrive."""
LOOK_S = 0.2
"""Seconds between checks that every host's agent is reporting."""
LINES = 5
"""Lines that a rank printed last, kept in the journal."""


class FailureDetector:
    """Diagnoses one attempt from the agents' reports and a clock.

    It looks for these faults in order: a rank that has ended, a silent host, live ranks without progress (`Watch`).
    Slowness and faults that may heal raise an alert instead.
    """

    def __init__(
        self,
        *,
        attempt: int,
        layout: Layout,
        fleet: Fleet,
        effects: Effects,
        settings: SuperviseConfig,
        deadlines: Deadlines,
        link_deadline_s: float,
        site_timeout: SiteTimeout,
        now: float,
    ) -> None:
        """Start without reports. ``site_timeout`` is the timeout policy for silent sites.

        Args:
            link_deadline_s: seconds that a transfer between sites may stand still.
        """
        self._attempt, self._layout, self._fleet, self._effects = attempt, layout, fleet, effects
        self._settings, self._site_timeout = settings, site_timeout
        self._has_rows, self._alerts_at, self._looked_at = False, now, now - LOOK_S
        self._plan_time = 0
        self._ends: dict[int, RankEnd] = {}
        self._ends_since = 0.0
        self._stopped = set[int]()
        self._lines: dict[int, list[str]] = {}
        self._silent: set[tuple[str, ...]] = set()
        self.progress = AttemptProgress(layout)
        self._watch = Watch(
            attempt=attempt,
            num_ranks=layout.num_ranks,
            deadlines=deadlines,
            heartbeat_s=settings.heartbeat_s,
            link_deadline_s=link_deadline_s,
            now=now,
        )
        self._alerts = Alerts(self._watch)

    def observe(self, said: AgentMessage, now: float) -> None:
        """Process an agent's message about this attempt."""
        self._watch.observe(said.report, now)
        self.progress.observe(said.report)
        self._lines |= said.lines
        ends = dict(said.ends)
        for rank, reason in said.standby.items():  # a consequence of a fault that may be reported later
            ends.setdefault(rank, RankEnd(kind=FaultKind.lost_peer, message=reason, status=1))
        self._stopped |= {rank for rank, end in ends.items() if end.kind is FaultKind.stopped}
        ends = {rank: end for rank, end in ends.items() if rank not in self._stopped}
        if ends and not self._ends:
            self._ends_since = now
        self._ends |= ends
        if not self._has_rows and self.progress.has_plan:
            self._plan_time = self._effects.plan_time()
            with suppress(TimeoutError):
                self._watch.rows, self._has_rows = self._effects.rows(), True

    @property
    def has_stopped(self) -> bool:
        """True if every rank has ended because of a signal."""
        return len(self._stopped) == self._layout.num_ranks > 0

    @property
    def step(self) -> int | None:
        """Return the step of the slowest rank, counted from 1, or None before training."""
        return self._watch.step

    @property
    def kept_step(self) -> int:
        """The step of the newest memory checkpoint of any rank, or 0 without one."""
        return max((seen.report.kept_step for seen in self._watch.ranks.values()), default=0)

    def last_lines(self, culprit: Mapping[str, Any]) -> list[str]:
        """Return the last lines that the culprit printed if it is a single rank, otherwise an empty list."""
        return self._lines.get(culprit.get("rank", -1), [])[-LINES:]

    def fault(self, now: float) -> Fault | None:
        """Return the fault that must end the attempt, or None. Raise alerts as well."""
        if self._ends and now < self._ends_since + SETTLE_S:
            return None
        if self._ends and not self._may_be_a_host(now):
            return fault_of_ends(self._ends, self._layout, self._watch, now)
        lost, watches = None, self._settings.enabled is not False  # a run without supervision waits
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            self._has_rows &= self._effects.plan_time() == self._plan_time  # an adaptation has changed them
            silence_s = self._settings.silence_s if watches else inf
            lost = self._fleet.lost(self._layout.slots, silence_s, now, self._site_patience_s)
            self._alert_of_silence(now)
        if lost is not None:
            kind, name, evidence = lost
            return Fault(kind, {"host": name}, evidence, self.step, now - self._watch.still_since)
        if not watches:
            return None
        diagnosis = self._watch.diagnosis(now)
        self._alert_of_slowness(now)
        if diagnosis is None:
            return None
        culprit = dict(diagnosis.culprit)
        if "rank" in culprit:
            culprit.setdefault("host", self._layout.host_of(culprit["rank"]))
        calls = self._effects.differing_calls(diagnosis.seconds)
        evidence = f"{diagnosis.evidence}; {calls}" if calls else diagnosis.evidence
        return replace(diagnosis, culprit=culprit, evidence=evidence)

    def _may_be_a_host(self, now: float) -> bool:
        """True if ranks have lost peers, and a host without a connection may be the cause."""
        limit = now - 2 * self._settings.heartbeat_s
        return all_lost(self._ends) and self._fleet.is_out_of_touch(self._layout.slots, limit)

    def _site_patience_s(self, site: Collection[str]) -> float:
        """Return the timeout of a silent site. It is 0 once a rank has ended, because waiting is useless then."""
        return 0.0 if self._ends else self._site_timeout.seconds(site)

    def _alert_of_silence(self, now: float) -> None:
        silent = self._fleet.silent_sites(self._layout.slots, self._settings.silence_s, now)
        for site in silent - self._silent:
            text = f"no sign of {', '.join(site)}: their site, or the links to it, which have"
            text += f" {self._site_patience_s(site):.0f} s to heal"
            self._alert("silent_site", {"hosts": list(site)}, text)
        self._silent = silent

    def _alert_of_slowness(self, now: float) -> None:
        if now < self._alerts_at + self._settings.heartbeat_s:
            return
        self._alerts_at = now
        for alert in self._alerts.look(now):
            self._alert(alert.kind, alert.culprit, alert.evidence)

    def _alert(self, kind: str, culprit: Mapping[str, Any], evidence: str) -> None:
        self._effects.record("alert", attempt=self._attempt, kind=kind, culprit=dict(culprit), evidence=evidence)
        self._effects.say(f"{kind}: {evidence}")
