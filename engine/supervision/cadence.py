"""Report times of an agent: every heartbeat, when a rank changes phase, and more often while one is stopped."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

OFTEN = 4
"""Reports per heartbeat while a signal has stopped a rank. The driver needs two of them, a second apart."""


class Cadence:
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
        """True to report, after `beats`.

        Args:
            phases: of the ranks. A change is reported at once.
            is_one_stopped: whether a signal has stopped a rank.
        """
        due = self._told_at == -inf or phases != self._phases
        if not due and (now < self._told_at + self._heartbeat_s / OFTEN or not is_one_stopped()):
            return False
        self._told_at, self._phases = now, phases
        return True
