"""Failure detection: the reports of one attempt, and the fault that ends it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Any

from weft.conf.schema import SuperviseConfig
from weft.engine.supervision.alerts import Alerts
from weft.engine.supervision.blame import all_lost, fault_of_ends
from weft.engine.supervision.budget import Fault
from weft.engine.supervision.deadlines import Deadlines
from weft.engine.supervision.effects import Effects
from weft.engine.supervision.faults import FaultKind, RankEnd
from weft.engine.supervision.fleet import Fleet
from weft.engine.supervision.layout import Layout
from weft.engine.supervision.message import AgentMessage
from weft.engine.supervision.patience import SitePatience
from weft.engine.supervision.progress import Progress, step_under_way
from weft.engine.supervision.watch import Watch

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
        patience: SitePatience,
        now: float,
    ) -> None:
        """Start without reports. ``patience`` is the timeout policy for silent sites.

        Args:
            link_deadline_s: seconds that a transfer between sites may stand still.
        """
        self._attempt, self._layout, self._fleet, self._effects = attempt, layout, fleet, effects
        self._settings, self._patience = settings, patience
        self._has_rows, self._alerts_at, self._looked_at = False, now, now - LOOK_S
        self._ends: dict[int, RankEnd] = {}
        self._ends_since = 0.0
        self._stopped = set[int]()
        self._lines: dict[int, list[str]] = {}
        self._silent: set[tuple[str, ...]] = set()
        self._progress = Progress(layout)
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
        """Take an agent's message of this attempt."""
        self._watch.observe(said.report, now)
        self._progress.observe(said.report)
        self._lines |= said.lines
        ends = dict(said.ends)
        for rank, reason in said.parked.items():  # a consequence of a fault that may be reported later
            ends.setdefault(rank, RankEnd(kind=FaultKind.lost_peer, message=reason, status=1))
        self._stopped |= {rank for rank, end in ends.items() if end.kind is FaultKind.stopped}
        ends = {rank: end for rank, end in ends.items() if rank not in self._stopped}
        if ends and not self._ends:
            self._ends_since = now
        self._ends |= ends
        if not self._has_rows and self._progress.has_plan:
            self._has_rows = True
            self._watch.rows = self._effects.rows()

    @property
    def has_imported(self) -> bool:
        """True if every rank is past its imports."""
        return self._progress.has_imported

    @property
    def has_stepped(self) -> bool:
        """True if every rank has done the first step of the attempt."""
        return self._progress.has_stepped

    @property
    def has_finished(self) -> bool:
        """True if every rank has ended well."""
        return self._progress.has_finished

    @property
    def has_stopped(self) -> bool:
        """True if every rank has ended because of a signal."""
        return len(self._stopped) == self._layout.num_ranks > 0

    @property
    def step(self) -> int | None:
        """The step of the slowest rank, from 1, or None before training."""
        return step_under_way(self._watch)

    @property
    def kept_step(self) -> int:
        """The newest step of which a rank has a memory checkpoint, or 0 without one."""
        return max((seen.report.kept_step for seen in self._watch.ranks.values()), default=0)

    def last_lines(self, culprit: Mapping[str, Any]) -> list[str]:
        """Return the last lines that a culprit printed, if it is one rank."""
        return self._lines.get(culprit.get("rank", -1), [])[-LINES:]

    def fault(self, now: float) -> Fault | None:
        """Return the fault that must end the attempt, if any, and raise alerts."""
        if self._ends and now < self._ends_since + SETTLE_S:
            return None
        if self._ends and not self._may_be_a_host(now):
            return fault_of_ends(self._ends, self._layout, self._watch, now)
        lost, watches = None, self._settings.enabled is not False  # a run without supervision waits
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            silence_s = self._settings.silence_s if watches else inf
            lost = self._fleet.lost(self._layout.slots, silence_s, now, self._site_patience_s)
            self._alert_of_silence(now)
        if lost is not None:
            kind, name, evidence = lost
            return Fault(kind, {"host": name}, evidence, self.step, now - self._watch.still_since)
        if not watches:
            return None
        verdict = self._watch.verdict(now)
        self._alert_of_slowness(now)
        if verdict is None:
            return None
        culprit = dict(verdict.culprit)
        if "rank" in culprit:
            culprit.setdefault("host", self._layout.host_of(culprit["rank"]))
        return Fault(verdict.kind, culprit, verdict.evidence, verdict.step, verdict.seconds)

    def _may_be_a_host(self, now: float) -> bool:
        """True if ranks have lost peers and a host without connection may be the cause."""
        limit = now - 2 * self._settings.heartbeat_s
        return all_lost(self._ends) and self._fleet.is_out_of_touch(self._layout.slots, limit)

    def _site_patience_s(self, site: Collection[str]) -> float:
        """Return the timeout of a silent site: 0 once a rank has ended, because waiting for links is useless then."""
        return 0.0 if self._ends else self._patience.seconds(site)

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
