"""What bubbles were, how much of them was used, and what it cost training."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

Spans = Sequence[tuple[float, float]]
LATE_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Borders of the histogram of lateness."""


def overlap_s(spans: Spans, others: Spans) -> float:
    """Seconds that lie in both; each is in order and without overlaps of its own."""
    total_s, index = 0.0, 0
    for start_s, end_s in spans:
        while index < len(others) and others[index][1] <= start_s:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end_s:
            total_s += min(end_s, others[at][1]) - max(start_s, others[at][0])
            at += 1
    return total_s


def length_s(spans: Spans) -> float:
    """Seconds of all spans."""
    return sum(end_s - start_s for start_s, end_s in spans)


def idle_between(work: Spans) -> list[tuple[float, float]]:
    """The bubbles between pieces of work."""
    return [(end_s, start_s) for (_, end_s), (start_s, _) in pairwise(work) if start_s > end_s]


def clipped(spans: Spans, windows: Spans) -> list[tuple[float, float]]:
    """The parts of ``spans`` that lie in ``windows``."""
    found = []
    for low_s, high_s in windows:
        first = max(0, bisect_left(spans, (low_s, low_s)) - 1)
        for start_s, end_s in spans[first:]:
            if start_s >= high_s:
                break
            if end_s > low_s:
                found.append((max(start_s, low_s), min(end_s, high_s)))
    return found


def steps_within(steps: Spans, windows: Spans) -> list[float]:
    """Durations of the steps that lie whole in one window."""
    return [end - start for start, end in steps if any(low <= start and end <= high for low, high in windows)]


@dataclass(frozen=True)
class RankUse:
    """How a rank's time was used in some windows, as shares of it."""

    trained: float
    prefilled: float
    bubbles_used: float
    """Share of the bubbles' time in which a prefill ran."""
    outside: float
    """Prefill time outside of bubbles, as a share of all prefill time."""


def use_of(work: Spans, prefills: Spans, windows: Spans) -> RankUse:
    """Reckon one rank."""
    whole_s = length_s(windows)
    busy, idle = clipped(work, windows), clipped(idle_between(work), windows)
    ran = clipped(prefills, windows)
    inside_s, idle_s, ran_s = overlap_s(ran, idle), length_s(idle), length_s(ran)
    return RankUse(
        trained=length_s(busy) / whole_s,
        prefilled=inside_s / whole_s,
        bubbles_used=inside_s / idle_s if idle_s else 0.0,
        outside=(ran_s - inside_s) / ran_s if ran_s else 0.0,
    )


def histogram(late_s: Sequence[float]) -> list[tuple[str, int]]:
    """How many steps ended how late, by class."""
    classes = [(f"<= {LATE_MS[0]:g} ms", sum(late <= 0.0 for late in late_s))]
    for low, high in [*pairwise(LATE_MS), (LATE_MS[-1], float("inf"))]:
        classes.append((f"{low:g}-{high:g} ms", sum(low < 1e3 * late <= high for late in late_s)))
    return classes


def slowdown(on_s: Sequence[float], off_s: Sequence[float]) -> float:
    """The median step with prefill over the one without, less one."""
    return median(on_s) / median(off_s) - 1.0
