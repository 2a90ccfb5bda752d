"""A layout's step, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A layout's step.

    Attributes:
        measured_s: the middle one, and ``spread`` the range of the middle half over it.
        told_s: predicted with the seconds that stages and collectives turned out to take: what it
            differs by from ``predicted_s`` is the machine's doing, or an estimate's.
    """

    name: str
    sites: int
    predicted_s: float
    told_s: float
    measured_s: float
    pipeline_s: float
    spread: float

    @property
    def error(self) -> float:
        """Return the error of the prediction, as a share of the measurement."""
        return self.predicted_s / self.measured_s - 1
