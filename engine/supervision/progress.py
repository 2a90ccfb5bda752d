"""The progress of an attempt, updated by each report of a host."""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.observability.watcher import Phase
from weft.engine.supervision.layout import Layout
from weft.engine.supervision.report import HostReport
from weft.engine.supervision.watch import Watch

_BEFORE_TRAINING = (Phase.imports, Phase.setup, Phase.parked)
_BEFORE_A_STEP = (*_BEFORE_TRAINING, Phase.first_step)


class Progress:
    """The hosts that have not yet done their imports, their first step, or all of their work.

    Attributes:
        has_plan: whether a rank has begun to train. Ranks write their plan into the run's folder before that.
    """

    def __init__(self, layout: Layout) -> None:
        """Start with all hosts."""
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
        """True if every rank is past its imports."""
        return not self._importing

    @property
    def has_stepped(self) -> bool:
        """True if every rank has done the first step of the attempt."""
        return not self._without_step

    @property
    def has_finished(self) -> bool:
        """True if every rank has succeeded."""
        return not self._unfinished


def step_under_way(watch: Watch) -> int | None:
    """Return the step of the slowest rank, from 1, or None before training."""
    steps: Iterable[int] = (seen.report.place.step for seen in watch.ranks.values())
    return min(steps, default=0) or None
