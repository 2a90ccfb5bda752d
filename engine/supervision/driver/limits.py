"""Limits of a run: timeouts learned from measured durations, the number of restarts, and the faults of a host."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from weft.conf.schema import SuperviseConfig
from weft.engine.observability.watcher import Phase
from weft.engine.supervision.messages import FaultKind

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
_OPEN = frozenset({Phase.finishing, Phase.standby})


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


MOST_BACKOFF_S = 600.0
SAME_FAULT = 3
"""Number of times that a fault at the same step ends the run, unless its class has another limit."""
MOST_LOST = 10
"""The same limit for losses of an agent or a host, most of which the run does not cause."""


@dataclass(frozen=True)
class Fault:
    """The fault that ended an attempt.

    Attributes:
        kind: a class of `FaultKind`, agent or host. Of live ranks: stopped (by a signal), lock_held (a thread has the
            interpreter's lock and computes), blocked (a thread has it and waits), hung (a rank does not run what it
            could), link (a transfer does not arrive).
        culprit: rank and host, ranks and hosts, host alone, or link. Empty if the culprit is unknown.
        step: the step that was in progress, or None before training.
        seconds: seconds since a rank last made progress.
        most: number of times that the fault may occur at the same step.
        final: whether another attempt would fail in the same way.
    """

    kind: str
    culprit: Mapping[str, Any]
    evidence: str
    step: int | None
    seconds: float
    most: int = SAME_FAULT
    final: bool = False

    @property
    def text(self) -> str:
        """Return a readable description in one line."""
        where = ", ".join(f"{name} {value}" for name, value in self.culprit.items()) or "nobody in particular"
        return f"{self.kind}: {where}: {self.evidence}"


class Budget:
    """Counts the faults since the run was launched.

    Attributes:
        fruitless: faults since the last good step.
    """

    def __init__(self, settings: SuperviseConfig) -> None:
        self._settings = settings
        self._restarts = self.fruitless = 0
        self._seen: list[tuple[str, str, int | None]] = []

    def saw_restart(self) -> None:
        """Note that an attempt has begun."""
        self._restarts += 1

    def saw_good_step(self) -> None:
        """Note that an attempt has reached its first step."""
        self.fruitless = 0

    def saw_fault(self, kind: str, culprit: Mapping[str, Any], step: int | None) -> int:
        """Count a fault, and return how often it has occurred at this step."""
        key = (kind, repr(sorted(culprit.items())), step)
        self._seen.append(key)
        self.fruitless += 1
        return self._seen.count(key)

    def end(self, fault: Fault, same: int) -> tuple[int, str] | None:
        """Return exit code and reason if the run must end because of this fault, or None if it goes on.

        ``same`` is the number of equal faults at this step, as `saw_fault` returned it.
        """
        if fault.final or self._settings.enabled is False:
            return (2 if fault.kind == FaultKind.input_error.value else 1), fault.text
        if same >= (MOST_LOST if fault.kind in ("agent", "host") else fault.most):
            return 1, f"the same fault at the same step {same} times: {fault.text}"
        if self._restarts >= self._settings.max_restarts:
            return 1, f"supervise.max_restarts={self._settings.max_restarts} reached: {fault.text}"
        return None

    def wait_s(self) -> float:
        """Return the seconds to wait before the next attempt."""
        if self.fruitless < 2:
            return 0.0
        return min(self._settings.backoff_s * 2 ** (self.fruitless - 2), MOST_BACKOFF_S)


SUSPICIOUS = 2
"""Number of faults of a host after which it is examined. The count starts again then."""
_OF_OTHERS = (FaultKind.lost_peer.value, FaultKind.disk_full.value, FaultKind.checkpoint.value)
"""Faults that do not count, because the host is not the cause or the cause is known."""


class Suspicions:
    """Counts the faults of each host."""

    def __init__(self) -> None:
        self._faults: Counter[str] = Counter()

    def saw_fault(self, kind: str, culprit: Mapping[str, Any]) -> None:
        """Count a fault for the hosts of its culprit."""
        if kind not in _OF_OTHERS:
            self._faults.update([culprit["host"]] if "host" in culprit else culprit.get("hosts", ()))

    def take(self) -> str | None:
        """Return a host to examine and reset its count, or None if there is none."""
        host = next((host for host, count in self._faults.items() if count >= SUSPICIOUS), None)
        if host is not None:
            del self._faults[host]
        return host


def reason_to_evict(failed: Sequence[str]) -> str:
    """Return the reason to evict a host, from its failed checks."""
    return f"weft doctor node: {'; '.join(failed)}"
