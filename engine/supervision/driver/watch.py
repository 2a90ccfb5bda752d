"""Diagnosis of an attempt whose ranks are alive, from their reports and a clock, without I/O.

Ends of ranks and silent hosts are handled elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from weft.conf.host.processes import STOPPED
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.culprit import JobRows, Suspect, find_culprits
from weft.engine.supervision.driver.limits import Deadlines, Fault
from weft.engine.supervision.messages import HostReport, RankReport, RowProgress

STOPPED_S = 1.0
"""Least seconds between two reports of a stopped process, without running in between, for a diagnosis."""
SILENT_S = 1.0
"""Seconds without a tick, beyond two heartbeats, after which a rank counts as silent."""
BUSY = 0.5
"""Share of a processor from which a process that holds the interpreter's lock counts as computing."""
LINES_KEPT = 200
"""Most matched log lines that are stored until they are reported."""
MOST_NAMED = 8
"""Most ranks that are named in a text."""


@dataclass(slots=True)
class Observed:
    """The driver's knowledge of a rank.

    Attributes:
        reported_at: time at which it arrived. All times are by the driver's clock.
        moved_at: time of the rank's last progress.
        phase_at: time at which its phase was first reported.
        tick_at: time at which a new tick was last reported.
        tick_cpu_s: processor time that the rank had used then.
        stopped_at: time since which its process is stopped, or None while it runs.
        pauses: number of times that it was stopped and continued.
    """

    report: RankReport
    host: str
    reported_at: float
    moved_at: float
    phase_at: float
    tick_at: float
    tick_cpu_s: float
    stopped_at: float | None = None
    pauses: int = 0

    @property
    def silent_s(self) -> float:
        """Seconds without a tick at the rank's last report."""
        return self.reported_at - self.tick_at


class Watch:
    """The progress of the ranks of one attempt, and the diagnosis when it stops."""

    def __init__(
        self,
        *,
        attempt: int,
        num_ranks: int,
        deadlines: Deadlines,
        heartbeat_s: float,
        link_deadline_s: float,
        now: float,
    ) -> None:
        """Start with an attempt.

        Args:
            deadlines: the run's timeouts, which learn durations from this watch.
            link_deadline_s: seconds that a transfer between sites may stand still, because links may heal.
            now: time of a monotonic clock in seconds, also in the other methods.
        """
        self._attempt, self._num_ranks = attempt, num_ranks
        self._deadlines, self._heartbeat_s = deadlines, heartbeat_s
        self._link_deadline_s = link_deadline_s
        self.ranks: dict[int, Observed] = {}
        """State of each rank."""
        self.rows: JobRows | None = None
        """Rows of every rank, once the attempt has written its plan."""
        self.vitals: dict[str, Mapping[str, Any]] = {}
        """Latest vital signs of each host."""
        self.lines: deque[tuple[str, Any]] = deque(maxlen=LINES_KEPT)
        """Hosts with their matched log lines that the alerts have not processed yet."""
        self._moved_at = now
        self._step, self._step_at = 0, now
        self._stopped: set[int] = set()
        self._found: tuple[tuple[float, float, bool], Sequence[Suspect]] | None = None

    # -- observation -------------------------------------------------------------------------------

    def observe(self, report: HostReport, now: float) -> None:
        """Process a host's report."""
        self.vitals[report.host] = report.vitals
        self.lines.extend((report.host, line) for line in report.vitals.get("patterns", ()))
        for rank in report.ranks:
            if rank.attempt == self._attempt:
                self._observe(rank, report.host, now)

    def _observe(self, rank: RankReport, host: str, now: float) -> None:
        seen = self.ranks.get(rank.rank)
        moved_at = now - rank.still_s
        if seen is None:
            self.ranks[rank.rank] = seen = Observed(rank, host, now, moved_at, now, now, rank.cpu_s)
            self._moved_at = max(self._moved_at, moved_at)
            before = rank
        else:
            before, seen.report, seen.reported_at = seen.report, rank, now
            if before.progress != rank.progress or before.phase is not rank.phase:
                self._note_move(seen, before, moved_at, now)
        if rank.tick != before.tick:
            seen.tick_at, seen.tick_cpu_s = now, rank.cpu_s
        if rank.state in STOPPED:
            if seen.stopped_at is None:
                seen.stopped_at = now
                self._stopped.add(rank.rank)
            elif (rank.tick, rank.progress, rank.cpu_s) != (before.tick, before.progress, before.cpu_s):
                seen.stopped_at = now  # the process has run in between
                seen.pauses += 1
        elif seen.stopped_at is not None:
            seen.stopped_at = None
            seen.pauses += 1
            self._stopped.discard(rank.rank)

    def _note_move(self, seen: Observed, before: RankReport, moved_at: float, now: float) -> None:
        seen.moved_at = moved_at
        if moved_at > self._moved_at:
            self._deadlines.saw_still(moved_at - self._moved_at)
            self._moved_at = moved_at
        if before.phase is not seen.report.phase:
            self._deadlines.saw_phase(before.phase, now - seen.phase_at)
            seen.phase_at = now
        step = seen.report.progress.step
        if step > self._step:
            if self._step and seen.report.phase is Phase.steady:
                self._deadlines.saw_step((now - self._step_at) / (step - self._step))
            self._step, self._step_at = step, now

    # -- diagnosis ---------------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """The step of the slowest rank, counted from 1, or None before training."""
        return min((seen.report.progress.step for seen in self.ranks.values()), default=0) or None

    @property
    def still_since(self) -> float:
        """Time of the last progress of any rank."""
        return self._moved_at

    def diagnosis(self, now: float) -> Fault | None:
        """Return the diagnosis, or None if nothing is wrong, or it is too early to tell."""
        for rank in sorted(self._stopped):
            seen = self.ranks[rank]
            if seen.stopped_at is not None and seen.reported_at - seen.stopped_at >= STOPPED_S:
                return self._of_rank("stopped", rank, now - seen.moved_at, "its process is stopped by a signal")
        still_s = now - self._moved_at
        if still_s < self._deadlines.least_s or not self._has_recent_reports(now):
            return None
        suspects = self.suspects(now)
        if not self._are_due(suspects, now):
            return None
        between = [suspect for suspect in suspects if suspect.rank is None and self._crosses(suspect)]
        if len(between) == len(suspects) and not self._links_are_due(now):
            return None
        return self._judged(suspects, still_s, now)

    def _are_due(self, suspects: Sequence[Suspect], now: float) -> bool:
        """True if the suspects have exceeded the deadline for progress, or without progress the one for ticks."""
        phases, still_s = self._phases(suspects), now - self._moved_at
        if still_s >= self._deadlines.deadline_s(phases):
            return True
        silent_s = [self.ranks[each.rank].silent_s if each.rank in self.ranks else 0.0 for each in suspects]
        return min([still_s, *silent_s]) >= self._deadlines.silent_s(phases)

    def _phases(self, suspects: Sequence[Suspect]) -> set[Phase]:
        """Return the phases of the suspects. For a link, these are the phases of the ranks at its ends."""
        ranks = {suspect.rank for suspect in suspects if suspect.rank is not None}
        ranks |= {rank for suspect in suspects for link in suspect.links for rank in link}
        return {self.ranks[rank].report.phase if rank in self.ranks else Phase.imports for rank in ranks}

    def suspects(self, now: float) -> Sequence[Suspect]:
        """Return the ranks or links that the others wait for. There are several if they cannot be distinguished."""
        key = self._moved_at, now // (self._heartbeat_s / 2), self._links_are_due(now)
        if self._found is None or self._found[0] != key:  # cached: slow with thousands of ranks
            self._found = key, self._find(now)
        return self._found[1]

    def _find(self, now: float) -> Sequence[Suspect]:
        return self._judge(now, [rank for rank, seen in self.ranks.items() if self._is_silent(seen, now)])

    def awaited(self, ended: Collection[int], now: float) -> Sequence[Suspect]:
        """Return the suspects. Ranks in ``ended`` do not count as silent, because they lost a peer and left."""
        left = {rank: seen for rank, seen in self.ranks.items() if rank not in ended}
        return self._judge(now, [rank for rank, seen in left.items() if self._is_silent(seen, now)])

    def _judge(self, now: float, silent: Collection[int]) -> Sequence[Suspect]:
        progress = {rank: seen.report.progress for rank, seen in self.ranks.items()}
        if self._knows_rows(progress):
            assert self.rows is not None
            broken, sound = self._broken(), self._sound(now)
            return find_culprits(self.rows, progress, silent=silent, broken=broken, sound=sound)
        return [Suspect(rank, doing=self._phase_text(rank)) for rank in sorted(silent or self._last(progress))]

    def stalled_link(self, now: float) -> Suspect | None:
        """Return a link between sites without progress that has not reached the deadline for links, or None."""
        if now - self._moved_at < self._deadlines.steady_s() or not self._has_recent_reports(now):
            return None
        suspects = self.suspects(now)
        return suspects[0] if suspects and suspects[0].rank is None and self._crosses(suspects[0]) else None

    def _judged(self, suspects: Sequence[Suspect], still_s: float, now: float) -> Fault:
        ranks = [suspect for suspect in suspects if suspect.rank is not None]
        usual = f"no rank has made progress for {still_s:.1f} s"
        if not ranks:
            texts = "; ".join(suspect.doing for suspect in suspects[:MOST_NAMED])
            links = [pair for suspect in suspects for pair in suspect.links]
            culprit = {"link": list(links[0])} if links else {}
            named = ", ".join(f"{a} - {b}" for a, b in links[:MOST_NAMED])
            return Fault("link", culprit, f"{usual}: sent over {named}, not there: {texts}", self.step, still_s)
        first = ranks[0].rank
        assert first is not None
        if len(ranks) > 1:
            names = ", ".join(str(suspect.rank) for suspect in ranks[:MOST_NAMED])
            more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
            kind = self._kind(first, now)
            culprit = {} if kind == "hung" else self._named(first)
            text = f"{usual}; ranks {names}{more} wait for each other or do nothing: rank {first} {ranks[0].doing}"
            return Fault(kind, culprit, text, self.step, still_s)
        return self._of_rank(self._kind(first, now), first, still_s, f"{usual}; it is {ranks[0].doing}")

    def _of_rank(self, kind: str, rank: int, seconds: float, evidence: str) -> Fault:
        return Fault(kind, self._named(rank), f"rank {rank}: {evidence}", self.step, seconds)

    def _named(self, rank: int) -> dict[str, Any]:
        """Return the rank, and its host if that has sent a report."""
        return {"rank": rank, "host": self.ranks[rank].host} if rank in self.ranks else {"rank": rank}

    def _kind(self, rank: int, now: float) -> str:
        """Return the kind of fault of a rank without progress, from the state of its process."""
        seen = self.ranks.get(rank)
        if seen is None:  # not started yet
            return "hung"
        if seen.report.state in STOPPED:
            return "stopped"
        if not self._is_silent(seen, now):
            return "hung"
        computed_s = seen.report.cpu_s - seen.tick_cpu_s
        return "lock_held" if computed_s > BUSY * max(seen.silent_s, 1e-9) else "blocked"

    def _is_silent(self, seen: Observed, now: float) -> bool:
        """True if a rank has ended or, after its imports, has stopped ticking."""
        if seen.report.exit_code is not None:
            return True
        return seen.report.phase is not Phase.imports and seen.silent_s > 2 * self._heartbeat_s + SILENT_S

    def _has_recent_reports(self, now: float) -> bool:
        """True if reports of all ranks are recent, so that missing progress is not only a missing report."""
        limit = now - 3 * self._heartbeat_s
        return all(seen.reported_at >= limit for seen in self.ranks.values())

    def _knows_rows(self, progress: Mapping[int, RowProgress]) -> bool:
        """True if all ranks are in a step whose schedule rows are known."""
        if (
            self.rows is None
            or len(progress) < len(self.rows.seats)
            or not all(each.step for each in progress.values())
        ):
            return False
        kinds = {seen.report.num_microbatches for seen in self.ranks.values()}
        return kinds == {replica.schedule.num_microbatches for replica in self.rows.replicas}

    def _last(self, progress: Mapping[int, RowProgress]) -> list[int]:
        """Return the slowest ranks, by phase and step."""
        missing = [rank for rank in range(self._num_ranks) if rank not in progress]
        if missing or not progress:
            return missing
        far = {rank: (seen.report.progress.step, _ORDER[seen.report.phase]) for rank, seen in self.ranks.items()}
        least = min(far.values())
        return [rank for rank, at in far.items() if at == least]

    def _phase_text(self, rank: int) -> str:
        seen = self.ranks.get(rank)
        if seen is None:
            return "not heard of"
        text = f"in {seen.report.phase.name.replace('_', ' ')}"
        return f"{text} of step {seen.report.progress.step}" if seen.report.progress.step else text

    def _broken(self) -> list[tuple[int, int]]:
        """Return links without a connection, as reported by either end."""
        return [(rank, link.peer) for rank, seen in self.ranks.items() for link in seen.report.links if not link.ready]

    def _sound(self, now: float) -> Iterator[tuple[int, int]]:
        """Yield links that cannot be the cause of a stalled transfer: shared memory of a host, and connected links.

        A failed link between sites loses its connections only after a while. So a link's connections prove that it
        works only after the deadline for links.
        """
        assert self.rows is not None
        for replica in self.rows.replicas:
            ranks = [replica.ranks[row] for row in replica.schedule.placement.stage_ranks]
            for here, there in pairwise(ranks):
                if here != there and self._works(here, there, now):
                    yield here, there

    def _works(self, here: int, there: int, now: float) -> bool:
        assert self.rows is not None
        ends = self.ranks[here], self.ranks[there]
        if self.rows.crosses(here, there):
            ready = [link.ready for seen in ends for link in seen.report.links if link.peer in (here, there)]
            return len(ready) == len(ends) and all(ready) and self._links_are_due(now)
        return ends[0].host == ends[1].host and not any(seen.report.device_bytes for seen in ends)

    def _links_are_due(self, now: float) -> bool:
        return now - self._moved_at >= self._link_deadline_s

    def _crosses(self, suspect: Suspect) -> bool:
        assert self.rows is not None
        return self.rows.crosses(*suspect.links[0])


_ORDER: Mapping[Phase, int] = {
    Phase.imports: 0,
    Phase.setup: 1,
    Phase.standby: 1,
    Phase.first_step: 2,
    Phase.steady: 3,
    Phase.evaluation: 4,
    Phase.checkpoint: 4,
    Phase.finishing: 5,
}
"""Order of phases, for ranks without comparable progress in a step."""
