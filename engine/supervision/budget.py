"""How often a run may start again, and after which wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.conf.schema import SuperviseConfig
from weft.engine.supervision.faults import FaultKind

MOST_BACKOFF_S = 600.0
SAME_FAULT = 3
"""Times that the same fault at the same step may come before the run ends, where its class says nothing else."""


MOST_LOST = 10
"""Times that an agent or a host may be lost before the same step: the run has no part in most of them."""


@dataclass(frozen=True)
class Fault:
    """The fault that ended an attempt.

    Attributes:
        kind: a class of `FaultKind`, a kind of a watch's verdict, agent or host.
        culprit: rank and host, ranks and hosts, host alone, or link; empty if nobody can be distinguished.
        evidence: one line.
        step: that was under way; None before training.
        seconds: since a rank last moved.
        most: times that it may come at the same step.
        final: whether another attempt would find the same.
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
        """Return a description for people, in one line."""
        where = ", ".join(f"{name} {value}" for name, value in self.culprit.items()) or "nobody in particular"
        return f"{self.kind}: {where}: {self.evidence}"


class Budget:
    """Counts what has failed since the run was launched.

    Attributes:
        fruitless: faults since the last good step.
    """

    def __init__(self, settings: SuperviseConfig) -> None:
        """Nothing has failed."""
        self._settings = settings
        self._restarts = self.fruitless = 0
        self._seen: list[tuple[str, str, int | None]] = []

    def saw_restart(self) -> None:
        """Another attempt has begun."""
        self._restarts += 1

    def saw_good_step(self) -> None:
        """An attempt has come to its first step."""
        self.fruitless = 0

    def saw_fault(self, kind: str, culprit: Mapping[str, Any], step: int | None) -> int:
        """Returns the times that this fault has come at this step."""
        key = (kind, repr(sorted(culprit.items())), step)
        self._seen.append(key)
        self.fruitless += 1
        return self._seen.count(key)

    def end(self, fault: Fault, same: int) -> tuple[int, str] | None:
        """The exit code and the reason if the run ends by this fault, which came ``same`` times; None if it goes on."""
        if fault.final or self._settings.enabled is False:
            return (2 if fault.kind == FaultKind.input_error.value else 1), fault.text
        if same >= (MOST_LOST if fault.kind in ("agent", "host") else fault.most):
            return 1, f"the same fault at the same step {same} times: {fault.text}"
        if self._restarts >= self._settings.max_restarts:
            return 1, f"supervise.max_restarts={self._settings.max_restarts} reached: {fault.text}"
        return None

    def wait_s(self) -> float:
        """Seconds before the next attempt."""
        if self.fruitless < 2:
            return 0.0
        return min(self._settings.backoff_s * 2 ** (self.fruitless - 2), MOST_BACKOFF_S)
