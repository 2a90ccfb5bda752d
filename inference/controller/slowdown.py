"""A worker's recent slowdown: seconds of bubbles that pass per second of predicted work, and its variation."""

from __future__ import annotations

from collections import deque
from math import ceil, inf

SAMPLE_S = 0.25
"""Prompts are averaged until this many seconds have passed in bubbles, or of predicted work."""
TOGETHER_S = 0.01
"""Prompts that end within this time of each other are in one sample, because one step of a worker can end many."""
MEMORY_S = 30.0
"""Age up to which samples count as the current speed: a host that was busy may be quiet again."""
FEW = 8
"""Samples that are kept however old they are, for the bound."""
QUANTILE = 0.95
"""Share of predictions whose error the bound covers."""
MOST_ERRORS = 256
"""Number of recent errors that count."""
LEAST_S = 0.5
"""Predictions of less are not compared: a single prompt may take several times as long as predicted."""
UNMEASURED = 1.5
"""Error that the bound covers before predictions were compared."""


class Slowdown:
    """A factor of at least 1 by which a worker is slower than predicted: its current average, and an upper bound."""

    def __init__(self) -> None:
        self._samples = deque[tuple[float, float, float]]()
        self._errors = deque[float](maxlen=MOST_ERRORS)

    def factor(self, now_s: float) -> float:
        """Return the average of the samples that are not old, or 1 if there are none."""
        return self._average(now_s - MEMORY_S)

    def bound(self, now_s: float) -> float:
        """Return a factor that is rarely exceeded: `last`, times an upper quantile of the prediction errors."""
        if len(self._errors) < 2:
            error = min([UNMEASURED, *self._errors])
        else:  # without the largest, because one stall is no property of the worker
            error = sorted(self._errors)[ceil(QUANTILE * (len(self._errors) - 1)) - 1]
        return (self.last(now_s) or 1.0) * max(1.0, error)

    def last(self, now_s: float) -> float:
        """Return the average of the recent samples, or of all samples if they are old, or 0 without samples."""
        return self._average(-inf if self.is_old(now_s) else now_s - MEMORY_S) if self._samples else 0.0

    def is_old(self, now_s: float) -> bool:
        """True if there was no measurement for a while, so that the worker's speed may have changed."""
        return not self._samples or now_s - self._samples[-1][0] > MEMORY_S

    def learn(self, now_s: float, passed_s: float, work_s: float) -> None:
        """Add a sample: a prompt of ``work_s`` has ended now, and took ``passed_s`` of the worker's bubbles."""
        if self._samples and (passed_s <= TOGETHER_S or max(self._samples[-1][1:]) < SAMPLE_S):
            _, before_s, done_s = self._samples.pop()
            passed_s, work_s = before_s + passed_s, done_s + work_s
        self._samples.append((now_s, passed_s, work_s))
        while len(self._samples) > FEW and now_s - self._samples[0][0] > MEMORY_S:
            self._samples.popleft()

    def compare(self, now_s: float, passed_s: float, work_s: float, last: float) -> None:
        """Add the error of a prediction for a prompt that has ended now.

        Args:
            passed_s: seconds of the worker's bubbles since the prompt was placed.
            work_s: when it was placed, the predicted work until its end.
            last: `last` when it was placed. If that was 0, the current `factor` is used.
        """
        predicted_s = work_s * (last or self.factor(now_s))
        if predicted_s >= LEAST_S:
            self._errors.append(passed_s / predicted_s)

    def _average(self, since_s: float) -> float:
        recent = [spent for at_s, *spent in self._samples if at_s >= since_s and max(spent) >= SAMPLE_S]
        # A worker that was stopped is late with one prompt, and as fast as before with later ones.
        counted = sorted(recent, key=lambda spent: spent[0] - spent[1])[:-1]
        passed_s, work_s = (sum(column) for column in zip(*counted, strict=True)) if counted else (1.0, 1.0)
        return max(1.0, passed_s / work_s)
