"""Alerts about slowness and problems that do not end an attempt: stragglers, slow links, full disks, log patterns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

from weft.engine.observability.watcher import Phase
from weft.engine.supervision.driver.culprit import JobRows
from weft.engine.supervision.driver.watch import Observed, Watch

SLOW_SHARE = 0.5
"""Share of its usual speed below which a link is slow."""
SLOW_READINGS = 4
"""Consecutive slow readings after which a link counts as slow. Each reading covers some seconds, so this takes about
six seconds, or that number of steps if these are longer."""
KNOWN_READINGS = 4
"""Readings needed before a usual speed is known."""
REMEMBERED = 32
"""Readings, and steps, after which earlier ones weigh a third in the usual speed, so that it follows changes."""


class LinkSpeed:
    """Speed readings of a link: one for each report of a rank or, if steps take longer, one for each step.

    Transfers differ within a step, but not between steps. So a reading is the peak speed within a whole step. It ends
    with the step, or after the usual duration of a step, because steps take longer on a slow link.

    Attributes:
        usual_bps: usual peak of a reading, in bit/s.
        fastest_bps: highest peak of the current series of slow readings, in bit/s.
    """

    def __init__(self) -> None:
        self.usual_bps = 0.0
        self.fastest_bps = 0.0
        self._sent_bytes = 0
        self._step = -1
        self._peaks: list[int] = []
        self._readings = self._slow = 0
        self._reports = self._steps = 0
        self._usual_reports = 0.0

    @property
    def is_slow(self) -> bool:
        """True if the last readings were far below the usual speed."""
        return self._slow >= SLOW_READINGS

    def read(self, step: int, sent_bytes: int, peak_bps: int, *, trains: bool = True) -> None:
        """Process a report of the sending rank.

        Args:
            sent_bytes: total bytes that the rank has sent over the link.
            peak_bps: recent peak speed, in bit/s.
            trains: whether the rank is training. Other phases, such as evaluation, have other transfers.
        """
        is_used = sent_bytes > self._sent_bytes > 0 and peak_bps > 0
        self._sent_bytes = max(self._sent_bytes, sent_bytes)
        if not (is_used and trains):
            return
        if step != self._step:
            self._end_step()
            self._step = step
        self._reports += 1
        self._peaks.append(peak_bps)
        if self._steps and len(self._peaks) >= round(self._usual_reports):
            self._end_reading()

    def _end_step(self) -> None:
        if self._peaks:
            self._end_reading()
        if self._reports:
            self._steps += 1
            self._usual_reports += (self._reports - self._usual_reports) / min(self._steps, REMEMBERED)
            self._reports = 0

    def _end_reading(self) -> None:
        peak = float(max(self._peaks))
        self._peaks.clear()
        if self._readings < KNOWN_READINGS or peak >= SLOW_SHARE * self.usual_bps:
            self._slow, self.fastest_bps = 0, 0.0
        else:
            self._slow, self.fastest_bps = self._slow + 1, max(self.fastest_bps, peak)
        self._readings += 1
        self.usual_bps += (peak - self.usual_bps) / min(self._readings, REMEMBERED)


WINDOW_STEPS = 10
"""Steps over which a rank must be slow before it is reported."""
READ_S = 5.0
"""Seconds between readings of ranks."""
KEPT = 64
"""Readings of a rank that are stored, including those of the window."""
FEWEST = 3
"""Least number of readings in the window, and before it, for an alert."""
SLOWER = 1.1
"""Least ratio of a straggler's time to its usual time, however steady it was."""
SLOWER_THAN_PEERS = 1.5
"""Least ratio of a rank's time to the median of its replicas, if the rank was slow from the beginning. A rank
without replicas is compared with other ranks, each relative to the plan's prediction."""
FEWEST_OTHERS = 2
"""Least number of ranks of other stages with which a rank without replicas is compared."""
FEWEST_PAUSES = 3
"""Number of times that a process is stopped and continued before it is reported."""
LOW_DISK_SHARE, LOW_DISK_BYTES = 0.03, 2 << 30
"""A disk is nearly full if its free space is below both."""
REPEAT_S = 300.0
"""Seconds after which an alert that still holds is raised again."""


@dataclass(frozen=True)
class Alert:
    """A problem to report that does not end the attempt.

    Attributes:
        kind: straggler, slow_link, stalled_link, disk or pattern.
        culprit: a rank and its host, a host, or a link (a pair of ranks).
    """

    kind: str
    culprit: Mapping[str, Any]
    evidence: str


@dataclass(slots=True)
class _Series:
    """Readings of one rank, each with the step at which it was taken.

    Attributes:
        count, total: cumulative figures at the last reading.
    """

    count: int = 0
    total: float = 0.0
    readings: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def parts(self) -> tuple[list[float], list[float]]:
        """Return the readings of the last `WINDOW_STEPS` or more, and earlier ones. Both are empty if too few exist."""
        count = FEWEST
        while count < len(self.readings) and self.readings[-1][0] - self.readings[-count - 1][0] < WINDOW_STEPS:
            count += 1
        values = [value for _, value in self.readings]
        before = values[:-count]
        return (values[-count:], before) if len(before) >= FEWEST else ([], [])


class Alerts:
    """Derives alerts from the state of a watch's ranks."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._busy: dict[int, _Series] = {}
        self._links: dict[tuple[int, int], LinkSpeed] = {}
        self._read_at = -inf
        self._raised: dict[tuple[str, str], float] = {}

    def look(self, now: float) -> list[Alert]:
        """Return alerts that are new, or that still hold after a while. Call this about as often as hosts report."""
        self._read_links()
        found = [*self._stalled(now), *self._slow_links(), *self._hosts()]
        if now - self._read_at >= READ_S:
            self._read_at = now
            self._read_ranks()
            found += [*self._paused(), *self._stragglers()]
        return [alert for alert in found if self._is_new(alert, now)]

    def _is_new(self, alert: Alert, now: float) -> bool:
        text = alert.evidence if alert.kind == "pattern" else str(sorted(alert.culprit.items()))
        key = alert.kind, text
        if now - self._raised.get(key, -REPEAT_S) < REPEAT_S:
            return False
        self._raised[key] = now
        return True

    # -- slowness ----------------------------------------------------------------------------------

    def _read_links(self) -> None:
        for rank, seen in self._watch.ranks.items():
            report, trains = seen.report, seen.report.phase is Phase.steady
            for link in report.links:
                speed = self._links.setdefault((rank, link.peer), LinkSpeed())
                speed.read(report.progress.step, link.sent_bytes, link.peak_bps, trains=trains)

    def _read_ranks(self) -> None:
        for rank, seen in self._watch.ranks.items():
            report, series = seen.report, self._busy.get(rank)
            if series is None:
                series = self._busy[rank] = _Series()
            if report.measured_steps > series.count:
                steps = report.measured_steps - series.count
                if series.count:  # the first steps of an attempt are slow
                    series.readings.append((report.progress.step, (report.busy_s - series.total) / steps))
                series.count, series.total = report.measured_steps, report.busy_s

    def _stragglers(self) -> Iterator[Alert]:
        parts = {rank: series.parts() for rank, series in self._busy.items()}
        known = {rank: (recent, before) for rank, (recent, before) in parts.items() if recent and median(before) > 0}
        slower = {rank: median(recent) / median(before) for rank, (recent, before) in known.items()}
        usual = median(slower.values()) if slower else 1.0
        for rank, (recent, before) in known.items():
            # Slower by more than its own steps vary, and not because all steps have become longer.
            if min(recent) > max(before) * max(1.0, usual) and slower[rank] > SLOWER * max(1.0, usual):
                text = f"its computations take {median(recent):.4g} s a step, and took {median(before):.4g} s"
                yield self._straggler(rank, text)
        yield from self._slow_from_the_beginning({rank: recent for rank, (recent, _) in known.items()})

    def _slow_from_the_beginning(self, recent: Mapping[int, list[float]]) -> Iterator[Alert]:
        rows = self._watch.rows
        if rows is None:
            return
        for position in zip(*(replica.ranks for replica in rows.replicas), strict=True):
            for rank in position:
                peers = [median(recent[peer]) for peer in position if peer != rank and peer in recent]
                if rank in recent and peers and min(recent[rank]) > SLOWER_THAN_PEERS * median(peers):
                    times = f"{median(recent[rank]):.4g} s a step, its replicas' {median(peers):.4g} s"
                    text = f"its computations take {times}"
                    yield self._straggler(rank, text)
        if len(rows.replicas) == 1:
            yield from self._slower_than_planned(rows, recent)

    def _slower_than_planned(self, rows: JobRows, recent: Mapping[int, list[float]]) -> Iterator[Alert]:
        """Yield alerts for ranks that exceed the plan's prediction by more than the others' ratios vary.

        The prediction for one stage may be wrong. Replicas of the stage would show that, but this job has none.
        """
        predicted = {rank: rows.predicted_s(rank) for rank in recent}
        ratios = {rank: [each / predicted[rank] for each in recent[rank]] for rank in recent if predicted[rank]}
        for rank, own in ratios.items():
            others = [median(values) for other, values in ratios.items() if other != rank]
            if len(others) < FEWEST_OTHERS:
                return
            usual = median(others)
            if min(own) > max(SLOWER_THAN_PEERS * usual, SLOWER * max(others)):
                factor = f"{median(own) / usual:.2g} times as long, alongside the plan, as other ranks' do"
                yield self._straggler(rank, f"its computations take {median(recent[rank]):.4g} s a step, {factor}")

    def _paused(self) -> Iterator[Alert]:
        for rank, seen in self._watch.ranks.items():
            if seen.pauses >= FEWEST_PAUSES:
                yield self._straggler(
                    rank, f"its process was seen stopped by a signal, and running again, {seen.pauses} times"
                )

    def _straggler(self, rank: int, text: str) -> Alert:
        return Alert("straggler", {"rank": rank, "host": self._seen(rank).host}, f"rank {rank}: {text}")

    def _slow_links(self) -> Iterator[Alert]:
        for (rank, peer), speed in self._links.items():
            if speed.is_slow:
                fastest, usual = (f"{bps / 1e6:.3g} Mbit/s" for bps in (speed.fastest_bps, speed.usual_bps))
                yield Alert(
                    "slow_link",
                    {"link": [rank, peer]},
                    f"rank {rank} to rank {peer}: {fastest} at its fastest of late, and {usual} is usual",
                )

    def _stalled(self, now: float) -> Iterator[Alert]:
        suspect = self._watch.stalled_link(now)
        if suspect is not None:
            names = ", ".join(f"{a} - {b}" for a, b in suspect.links)
            yield Alert("stalled_link", {"link": [*suspect.links[0]]}, f"nothing comes over {names}: {suspect.doing}")

    def _seen(self, rank: int) -> Observed:
        return self._watch.ranks[rank]

    # -- reports of hosts --------------------------------------------------------------------------

    def _hosts(self) -> Iterator[Alert]:
        for host, vitals in self._watch.vitals.items():
            free, total = vitals.get("disk_free_bytes"), vitals.get("disk_bytes")
            if isinstance(free, int) and isinstance(total, int) and free < min(LOW_DISK_SHARE * total, LOW_DISK_BYTES):
                yield Alert("disk", {"host": host}, f"{host}: {free >> 20} MiB of {total >> 20} are free for the run")
        while self._watch.lines:
            match self._watch.lines.popleft():
                case [str(host), [int(rank), str(name), str(line)]]:
                    yield Alert("pattern", {"rank": rank, "host": host}, f"rank {rank}: {name}: {line}")
