"""References for measured figures: the device's data sheet, or the best that this host has reached before."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weft.conf.host.diagnosis import Finding, Verdict
from weft.conf.host.measurements import Measurement, Measurements

TRIES = 3
"""Measurements before a figure counts as too low: another process may have disturbed it."""


@dataclass(frozen=True)
class Judge:
    """Compares measurements with references, and stores the best measurements of this host.

    Attributes:
        cache: best measurements by check and device.
    """

    cache: Measurements

    def by_data_sheet(
        self, check: str, measure: Callable[[], float], *, peak: float, share: float, unit: str
    ) -> Finding:
        """Pass if a measurement reaches ``share`` of the data sheet's figure."""
        figure, least = _best(measure, share * peak), share * peak
        says = f"{figure:.3g} {unit}, {figure / peak:.0%} of the data sheet's {peak:.3g}"
        return Finding(check, _verdict(figure >= least), says, figure, unit, least)

    def by_own_best(self, check: str, device: str, measure: Callable[[], float], *, share: float, unit: str) -> Finding:
        """Pass if a measurement reaches ``share`` of this host's best so far; the first measurement always passes."""
        name = f"{check}, {device}"
        known = self.cache.read().get(name)
        best = float(known.value) if known and isinstance(known.value, (int, float)) and known.value > 0 else 0.0
        figure, least = _best(measure, share * best), share * best
        if not best:
            says = f"{figure:.3g} {unit}, the first figure of this host: later ones are held against it"
        else:
            says = f"{figure:.3g} {unit}, {figure / best:.0%} of the best here so far, {best:.3g}"
        if figure > best:
            try:
                self.cache.put({name: Measurement.now(figure)})
            except OSError as error:
                says += f"; not kept: {self.cache.path}: {error.strerror}"
        return Finding(check, _verdict(figure >= least), says, figure, unit, least if best else None)


def _best(measure: Callable[[], float], least: float) -> float:
    figure = -math.inf
    for _ in range(TRIES):
        figure = max(figure, measure())
        if figure >= least:
            break
    return figure


def _verdict(good: bool) -> Verdict:
    return Verdict.passed if good else Verdict.failed
