"""How long ranks may stand still: by phase, and learned from how long they usually do."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Set
from math import inf
from statistics import median

from weft.engine.supervision.places import Phase

STEPS_KEPT = 32
"""Steps whose duration is remembered, and how long nobody moved in each."""
FEWEST_STEPS = 3
"""Durations of steps that have to be known before a deadline rests on them."""
EARLY_S = 60.0
"""Seconds that nobody need move for in the first steps of a run, of which no duration is known yet."""
STILL_FACTOR, STEP_FACTOR, PHASE_FACTOR = 4.0, 2.0, 5.0
"""Factors of a deadline: of the longest time without progress; of a usual step; of a phase's longest duration."""
LEAST_PHASE_S = 120.0
"""Seconds that an evaluation or a checkpoint may always take."""
SILENT_FACTOR = 2.0
"""Factor of these phases' deadlines over steady training for ranks without ticks: they write and compute without the
interpreter's lock."""

_LONG = frozenset({Phase.imports, Phase.setup, Phase.first_step})
_OPEN = frozenset({Phase.finishing, Phase.parked})


class Deadlines:
    """The measured rhythm of a run; it outlives an attempt, because the next one has the same."""

    def __init__(self, *, least_s: float, setup_s: float) -> None:
        """Nothing is known yet.

        Args:
            least_s: least seconds that ranks may stand still in steady training.
            setup_s: seconds that they may in imports, set-up or the first step.
        """
        self.least_s, self._setup_s = least_s, max(least_s, setup_s)
        self._steps_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._still_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._still_now_s = 0.0
        self._phases_s: dict[Phase, float] = {}

    def saw_step(self, seconds: float) -> None:
        """A step, or each of several, has taken so long."""
        self._steps_s.append(seconds)
        self._still_s.append(self._still_now_s)
        self._still_now_s = 0.0

    def saw_still(self, seconds: float) -> None:
        """Nobody had moved for so long, when somebody did."""
        self._still_now_s = max(self._still_now_s, seconds)

    def saw_phase(self, phase: Phase, seconds: float) -> None:
        """A rank has spent so long in a phase."""
        self._phases_s[phase] = max(seconds, self._phases_s.get(phase, 0.0))

    @property
    def step_s(self) -> float:
        """A usual step; 0 if unknown."""
        return median(self._steps_s) if self._steps_s else 0.0

    def steady_s(self) -> float:
        """Seconds that nobody may have moved for in steady training.

        It grows with steps, and with how long nobody moved in the last of them; but an outage of many steps
        that healed has not made outages usual.
        """
        if len(self._steps_s) < FEWEST_STEPS:
            first_s = self._phases_s.get(Phase.first_step, 0.0)
            return min(max(EARLY_S, PHASE_FACTOR * first_s), self._setup_s)
        still_s = min(max(self._still_s), self.step_s)
        return max(self.least_s, STILL_FACTOR * still_s, STEP_FACTOR * self.step_s)

    def deadline_s(self, phases: Collection[Phase]) -> float:
        """Seconds that ranks in these phases may stand still; the most patient phase decides."""
        return max(map(self._of, phases), default=inf)

    def silent_s(self, phases: Set[Phase]) -> float:
        """Seconds for which ranks in these phases may give no sign of life while they stand still."""
        if not phases or not phases <= {Phase.steady, Phase.evaluation, Phase.checkpoint}:
            return inf  # imports and first steps hold the interpreter's lock for as long as they like
        return SILENT_FACTOR * self.steady_s()

    def _of(self, phase: Phase) -> float:
        if phase in _OPEN:  # an export or an upload takes as long as it takes
            return inf
        if phase is Phase.steady:
            return self.steady_s()
        if phase in _LONG or phase not in self._phases_s:
            return self._setup_s
        return min(max(LEAST_PHASE_S, PHASE_FACTOR * self._phases_s[phase]), self._setup_s)
