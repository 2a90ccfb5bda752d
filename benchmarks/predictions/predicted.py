"""A layout's step, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A layout's step, predicted and measured.

    Attributes:
        measured_s: median of the measured steps.
        spread: range of the middle half of the steps over the median.
        told_s: step predicted with the measured seconds of stages and collectives. The difference from ``predicted_s``
            is due to the machine, or to an estimate.
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
        """The error of the prediction, as a share of the measurement."""
        return self.predicted_s / self.measured_s - 1
