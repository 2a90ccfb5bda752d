"""Timeouts of ranks and of silent sites, learned from measured durations, and the times of reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Set
from math import inf
from statistics import median
from typing import Any

from weft.engine.observability.watcher import Phase

STEPS_KEPT = 32
"""Number of recent steps whose duration and longest time without progress are stored."""
FEWEST_STEPS = 3
"""Least number of measured steps before deadlines are derived from them."""
EARLY_S = 60.0
"""Least timeout in the first steps of a run, while no duration is known, in seconds."""
STILL_FACTOR, STEP_FACTOR, PHASE_FACTOR = 4.0, 2.0, 5.0
"""Factors of a deadline: of the longest time without progress, of a usual step, of a phase's longest duration."""
LEAST_PHASE_S = 120.0
"""Seconds that an evaluation or a checkpoint may always take."""
SILENT_FACTOR = 2.0
"""Factor of these phases' deadlines over steady training, for ranks without ticks. In these phases ranks write and
compute without the interpreter's lock."""

_LONG = frozenset({Phase.imports, Phase.setup, Phase.first_step})
_OPEN = frozenset({Phase.finishing, Phase.parked})


class Deadlines:
    """Measured durations of a run's steps and phases, and the timeouts derived from them.

    They outlive an attempt, because the next attempt has similar durations.
    """

    def __init__(self, *, least_s: float, setup_s: float) -> None:
        """Start without measurements.

        Args:
            least_s: minimum timeout without progress in steady training, in seconds.
            setup_s: timeout without progress in imports, set-up and the first step, in seconds.
        """
        self.least_s, self._setup_s = least_s, max(least_s, setup_s)
        self._steps_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._still_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._still_now_s = 0.0
        self._phases_s: dict[Phase, float] = {}

    def saw_step(self, seconds: float) -> None:
        """Record the duration of a step, or the average of several."""
        self._steps_s.append(seconds)
        self._still_s.append(self._still_now_s)
        self._still_now_s = 0.0

    def saw_still(self, seconds: float) -> None:
        """Record the length of a period, now over, in which no rank made progress."""
        self._still_now_s = max(self._still_now_s, seconds)

    def saw_phase(self, phase: Phase, seconds: float) -> None:
        """Record how long a rank has spent in a phase."""
        self._phases_s[phase] = max(seconds, self._phases_s.get(phase, 0.0))

    @property
    def step_s(self) -> float:
        """Usual duration of a step in seconds, or 0 if unknown."""
        return median(self._steps_s) if self._steps_s else 0.0

    def steady_s(self) -> float:
        """Return the seconds without progress of any rank that are allowed in steady training.

        The limit grows with the duration of steps and with recent times without progress. A single long outage
        that healed does not raise it.
        """
        if len(self._steps_s) < FEWEST_STEPS:
            first_s = self._phases_s.get(Phase.first_step, 0.0)
            return min(max(EARLY_S, PHASE_FACTOR * first_s), self._setup_s)
        still_s = min(max(self._still_s), self.step_s)
        return max(self.least_s, STILL_FACTOR * still_s, STEP_FACTOR * self.step_s)

    def deadline_s(self, phases: Collection[Phase]) -> float:
        """Return the seconds without progress that are allowed in these phases: the largest of their limits."""
        return max(map(self._of, phases), default=inf)

    def silent_s(self, phases: Set[Phase]) -> float:
        """Return the seconds without a tick that are allowed to ranks in these phases while they make no progress."""
        if not phases or not phases <= {Phase.steady, Phase.evaluation, Phase.checkpoint}:
            return inf  # imports and first steps may hold the interpreter's lock for any time
        return SILENT_FACTOR * self.steady_s()

    def _of(self, phase: Phase) -> float:
        if phase in _OPEN:  # the duration of an export or an upload is unbounded
            return inf
        if phase is Phase.steady:
            return self.steady_s()
        if phase in _LONG or phase not in self._phases_s:
            return self._setup_s
        return min(max(LEAST_PHASE_S, PHASE_FACTOR * self._phases_s[phase]), self._setup_s)


HEAL_S = 10.0
"""Least timeout in seconds, because most interruptions are shorter."""


class SiteTimeout:
    """Ski-rental rule: wait as long as one restart costs, then restart. This costs at most twice the optimum.

    The cost of a restart is the duration of the last start without its imports, which a restart does not repeat. If
    the run cannot continue without the site, or no start has been timed, the timeout of links applies.

    Attributes:
        is_importing: whether ranks of the current attempt may still be importing.
    """

    def __init__(self, link_s: float, goes_on_without: Callable[[Collection[str]], bool]) -> None:
        """Start without a measured restart.

        Args:
            link_s: seconds that a link between sites may stand still.
            goes_on_without: returns whether an attempt is possible without the hosts that are silent.
        """
        self._link_s, self._goes_on_without = link_s, goes_on_without
        self._restart_s = inf
        self._began: float | None = None
        self.is_importing = False
        self._answers: dict[frozenset[str], bool] = {}

    def began(self, now: float | None) -> None:
        """Note that an attempt has begun at ``now``, or at an unknown time if that is None."""
        self._began, self.is_importing = now, now is not None
        self._answers.clear()

    def imported(self, now: float | None) -> None:
        """Note that every rank is past its imports."""
        self._began, self.is_importing = now, False

    def came_to_step(self, now: float | None) -> None:
        """Note that the attempt has done its first step."""
        if now is not None and self._began is not None:
            self._restart_s = max(0.0, now - self._began)
        self._began = None

    def seconds(self, site: Collection[str]) -> float:
        """Return the timeout in seconds of a silent site, which consists of these hosts."""
        least = max(HEAL_S, self._restart_s)
        return least if least < self._link_s and self._enough_without(frozenset(site)) else self._link_s

    def _enough_without(self, site: frozenset[str]) -> bool:
        if site not in self._answers:
            self._answers[site] = self._goes_on_without(site)
        return self._answers[site]


OFTEN = 4
"""Reports per heartbeat while a signal has stopped a rank. The driver needs two of them, a second apart."""


class ReportTimes:
    """The times of one agent's reports, by a monotonic clock in seconds."""

    def __init__(self, heartbeat_s: float) -> None:
        """Start with a heartbeat and a report due."""
        self._heartbeat_s = heartbeat_s
        self._beat_at = self._told_at = -inf
        self._phases: Any = None

    def beats(self, now: float) -> bool:
        """True if the next heartbeat is due. The next interval begins with this call."""
        if now < self._beat_at + self._heartbeat_s:
            return False
        self._beat_at, self._told_at = now, -inf
        return True

    def tells(self, now: float, phases: Any, is_one_stopped: Callable[[], bool]) -> bool:
        """True if a report is due. Call this after `beats`.

        Args:
            phases: phases of the ranks. A change is reported immediately.
            is_one_stopped: whether a signal has stopped a rank.
        """
        due = self._told_at == -inf or phases != self._phases
        if not due and (now < self._told_at + self._heartbeat_s / OFTEN or not is_one_stopped()):
            return False
        self._told_at, self._phases = now, phases
        return True
