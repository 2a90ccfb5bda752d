"""A worker's recent slowdown: seconds of bubbles that pass per second of predicted work."""

from __future__ import annotations

from collections import deque
from math import ceil

SAMPLE_S = 0.25
"""Prompts are averaged until this many seconds have passed in bubbles, or of predicted work."""
TOGETHER_S = 0.01
"""Prompts that end within this time of each other are in one sample, because one step of a worker can end many."""
SAMPLES = 8
"""Number of latest samples that count."""
MEMORY_S = 30.0
"""Age up to which they count. Later nothing is known: a host that was busy may be quiet again, and a worker that
only refuses prompts would never be measured again."""
QUANTILE = 0.75
"""Of the samples. The slowest sample never counts alone: a worker that was stopped for a moment is late with one prompt
only, and as fast as before with those behind it."""


class Slowdown:
    """A factor of at least 1 on a worker's predicted work."""

    def __init__(self) -> None:
        """Start at 1."""
        self._samples = deque[tuple[float, float, float]](maxlen=SAMPLES)

    def factor(self, now_s: float) -> float:
        """The current factor."""
        ratios = sorted(
            passed_s / work_s
            for at_s, passed_s, work_s in [*self._samples, (now_s, 1.0, 1.0)]
            if now_s - at_s <= MEMORY_S and max(passed_s, work_s) >= SAMPLE_S
        )
        return max(1.0, ratios[max(0, min(ceil(QUANTILE * len(ratios)) - 1, len(ratios) - 2))])

    def learn(self, now_s: float, passed_s: float, work_s: float) -> None:
        """Add a prompt of ``work_s`` during which ``passed_s`` passed in the worker's bubbles; it has ended now."""
        if self._samples and (passed_s <= TOGETHER_S or max(self._samples[-1][1:]) < SAMPLE_S):
            _, before_s, done_s = self._samples.pop()
            passed_s, work_s = before_s + passed_s, done_s + work_s
        self._samples.append((now_s, passed_s, work_s))
