"""Statistics of deviations: ranks of a class, compared within each step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

LOW = 0.3
"""Quantile over the steps that is compared where there are no peers: other processes of a host make some longer."""
HIGH = 0.8
"""Quantile that is compared to find what is slower in some steps."""
LEAST_DEVIATION = 0.05
SPREAD_SIGMAS = 6.0
ERROR_OF_SPREAD = 1.5
"""Standard error of a quantile for one step, in units of the distance of the quantiles 0.15 below and above it."""
ERROR_OF_QUARTILES = 1.0
"""Standard error of the median for one step, in units of the distance of the quartiles of 20 steps."""
NEWEST = 20
"""Steps in which a deviation must still be there."""
PASSES = 3
"""Passes in which usual seconds are found without the noise that ranks share in a step."""
LEAST_STEADY = 0.8
"""Share of the steps in which an outlier exceeds half of its deviation, if there is no noise."""


def lower_median(values: np.ndarray) -> np.ndarray:
    """Return the lower median over the last axis: a fault makes ranks slower, and never faster."""
    return np.sort(values, axis=-1)[..., (values.shape[-1] - 1) // 2]


def quantiles(seconds: np.ndarray, of: Sequence[float]) -> np.ndarray:
    """Return quantiles of each column, which is that of a rank over the steps. NaN for one without any value."""
    if not np.isnan(seconds).any():
        return np.quantile(seconds, of, axis=0)
    found = np.full((len(of), seconds.shape[1]), np.nan)
    is_known = ~np.isnan(seconds).all(axis=0)
    found[:, is_known] = np.nanquantile(seconds[:, is_known], of, axis=0)
    return found


def logs(seconds: Any) -> Any:
    """Return logarithms, NaN for 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(np.where(np.asarray(seconds) > 0, seconds, np.nan))


def against_peers(seconds: np.ndarray) -> np.ndarray:
    """Return the logarithm of each rank's seconds over those that its class needs in the same step.

    A class needs the lower median of its ranks' usual seconds, times the middle of its other ranks' ratios to their own
    usual seconds in the step.

    Args:
        seconds: of the two or more ranks of a class, by step and rank.
    """
    values = logs(seconds)
    usual = quantiles(values, (0.5,))[0]
    for _ in range(PASSES):
        usual = quantiles(values - middle_of_rows(values - usual), (0.5,))[0]
    ratios = values - usual
    order = np.argsort(ratios, axis=1)  # NaN last
    ordered, place = np.take_along_axis(ratios, order, axis=1), np.argsort(order, axis=1)
    others = (~np.isnan(ratios)).sum(axis=1, keepdims=True) - 1
    middle = np.zeros(ratios.shape)
    for index in ((others - 1) // 2, others // 2):
        at = np.clip(index + (index >= place), 0, ratios.shape[1] - 1)
        middle += np.take_along_axis(ordered, at, axis=1) / 2
    known = usual[~np.isnan(usual)]
    if not len(known):
        return ratios
    return np.where(others > 0, ratios - middle, np.nan) + usual - lower_median(known)


def middle_of_rows(values: np.ndarray) -> np.ndarray:
    """Return the median of each row as a column, NaN for a row without values."""
    return quantiles(values.T, (0.5,))[0][:, None]


def deviation(ratios: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return by which share ranks deviate, and the standard error of its logarithm.

    The error is not below that of half of the ranks, because that of one rank's few steps may be too small by chance.

    Args:
        ratios: logarithms of ratios by step and rank.
        at: the quantile by rank that is the deviation: LOW, or the median.
    """
    quarter, low, median, above = quantiles(ratios, (0.25, LOW, 0.5, 0.75))
    count = np.maximum(1, (~np.isnan(ratios)).sum(axis=0))
    error = ERROR_OF_QUARTILES * (above - quarter) / np.sqrt(count)
    if np.isfinite(error).any():
        error = np.maximum(error, np.nanmedian(error))
    return np.expm1(np.where(at == LOW, low, median)), error


def is_steady(ratios: np.ndarray, share: float, error: float) -> bool:
    """Return True if a deviation is there in most steps, and has not ended in the newest.

    Args:
        ratios: logarithms of a rank's ratios by step.
        share, error: the rank's deviation and its error. See `deviation`.
    """
    known, half = ratios[~np.isnan(ratios)], np.log1p(share) / 2
    noise = NormalDist(0.0, max(error * np.sqrt(len(known)) / 1.25, 1e-9))
    newest = known[-NEWEST:]
    return bool((known > half).mean() >= LEAST_STEADY * noise.cdf(half)) and bool(np.median(newest) > half)


def least_share(spread: Any, count: Any) -> Any:
    """Return the share from which a deviation of a quantile is significant.

    Args:
        spread: distance between the quantiles that are 0.15 below and above it, as a share of the expected seconds.
        count: number of values.
    """
    return np.maximum(LEAST_DEVIATION, SPREAD_SIGMAS * ERROR_OF_SPREAD * spread / np.sqrt(count))
