"""A worker's recent slowdown: seconds of bubbles that pass per second of predicted work."""

from __future__ import annotations

from collections import deque

SAMPLE_S = 0.25
"""Prompts are averaged until this many seconds have passed in bubbles, or of predicted work."""
TOGETHER_S = 0.01
"""Prompts that end within this time of each other are in one sample, because one step of a worker can end many."""
MEMORY_S = 30.0
"""Age up to which samples count. Later nothing is known: a host that was busy may be quiet again, and a worker that
only refuses prompts would never be measured again."""


class Slowdown:
    """A factor of at least 1 on a worker's predicted work: the average of all samples but the slowest."""

    def __init__(self) -> None:
        """Start at 1."""
        self._samples = deque[tuple[float, float, float]]()

    def factor(self, now_s: float) -> float:
        """The current factor."""
        while self._samples and now_s - self._samples[0][0] > MEMORY_S:
            self._samples.popleft()
        recent = [spent for _, *spent in self._samples if max(spent) >= SAMPLE_S]
        # A worker that was stopped is late with one prompt, and as fast as before with those behind it.
        counted = sorted(recent, key=lambda spent: spent[0] - spent[1])[:-1]
        passed_s, work_s = (sum(column) for column in zip(*counted, strict=True)) if counted else (1.0, 1.0)
        return max(1.0, passed_s / work_s)

    def learn(self, now_s: float, passed_s: float, work_s: float) -> None:
        """Add a prompt of ``work_s`` during which ``passed_s`` passed in the worker's bubbles; it has ended now."""
        if self._samples and (passed_s <= TOGETHER_S or max(self._samples[-1][1:]) < SAMPLE_S):
            _, before_s, done_s = self._samples.pop()
            passed_s, work_s = before_s + passed_s, done_s + work_s
        self._samples.append((now_s, passed_s, work_s))
