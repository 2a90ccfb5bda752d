"""The retry budget: how often a run may restart, and after which delay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.conf.schema import SuperviseConfig
from weft.engine.supervision.faults import FaultKind

MOST_BACKOFF_S = 600.0
SAME_FAULT = 3
"""Number of times that a fault at the same step ends the run, unless its class has another limit."""


MOST_LOST = 10
"""The same limit for losses of an agent or a host, most of which the run does not cause."""


@dataclass(frozen=True)
class Fault:
    """The fault that ended an attempt.

    Attributes:
        kind: a class of `FaultKind`, a kind of a watch's diagnosis, agent or host.
        culprit: rank and host, ranks and hosts, host alone, or link. Empty if the culprit is unknown.
        evidence: one line.
        step: that was under way, or None before training.
        seconds: since a rank last moved.
        most: times that it may occur at the same step.
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
        """Start without faults."""
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
        """Return how often this fault has occurred at this step."""
        key = (kind, repr(sorted(culprit.items())), step)
        self._seen.append(key)
        self.fruitless += 1
        return self._seen.count(key)

    def end(self, fault: Fault, same: int) -> tuple[int, str] | None:
        """Return exit code and reason if the run ends by this fault, the ``same``-th of its kind, or None to go on."""
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
