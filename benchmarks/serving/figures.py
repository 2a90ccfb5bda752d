"""Evaluation of bubbles: their length, their use, and their cost to training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from weft.inference.board.common_bubbles import Spans, intersection


def length_s(spans: Spans) -> float:
    """Return the total seconds of all spans."""
    return sum(end_s - start_s for start_s, end_s in spans)


def idle_between(work: Spans) -> list[tuple[float, float]]:
    """Return the bubbles between spans of work."""
    return [(end_s, start_s) for (_, end_s), (start_s, _) in pairwise(work) if start_s > end_s]


def steps_within(steps: Spans, windows: Spans) -> list[float]:
    """Return the durations of the steps that lie completely within one window."""
    return [end - start for start, end in steps if any(low <= start and end <= high for low, high in windows)]


@dataclass(frozen=True)
class RankUse:
    """How a rank's time in some windows is used, as shares."""

    trained: float
    prefilled: float
    bubbles_used: float
    """Share of the bubbles' time in which a prefill ran."""
    outside: float
    """Prefill time outside of bubbles, as a share of all prefill time."""


def use_of(work: Spans, prefills: Spans, windows: Spans) -> RankUse:
    """Compute the shares of one rank's time within ``windows``."""
    whole_s = length_s(windows)
    busy, idle = intersection(work, windows), intersection(idle_between(work), windows)
    ran = intersection(prefills, windows)
    inside_s, idle_s, ran_s = length_s(intersection(ran, idle)), length_s(idle), length_s(ran)
    return RankUse(
        trained=length_s(busy) / whole_s,
        prefilled=inside_s / whole_s,
        bubbles_used=inside_s / idle_s if idle_s else 0.0,
        outside=(ran_s - inside_s) / ran_s if ran_s else 0.0,
    )
